"""Megatron's tokenizers as the data room sees them: SentencePiece, Hugging Face and Null."""

import copy
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers import MegatronTokenizer as MegatronsOwn

from megatron_packing import VarlenDataset
from megatron_packing.data import Encoder
from megatron_packing.errors import ConfigError, PackingError
from megatron_packing.mcore.dataset import PackingDatasetConfig
from megatron_packing.mcore.tokenizer import MegatronTokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}"
)
CHAT = {"messages": [{"role": "user", "content": "What is two?"}, {"role": "assistant", "content": "One and one."}]}


@pytest.fixture(scope="module")
def sentencepiece() -> Any:
    pytest.importorskip("mistral_common", reason="needs mistral-common's 32k SentencePiece model")
    return _sentencepiece(Path(str(files("mistral_common") / "data" / "tokenizer.model.v1")))


def _sentencepiece(path: Path) -> Any:
    return MegatronsOwn.from_pretrained(tokenizer_path=str(path), metadata_path={"library": "sentencepiece"})


def _huggingface(folder: Path) -> Any:
    return MegatronsOwn.from_pretrained(tokenizer_path=str(folder), metadata_path={"library": "huggingface"})


@pytest.fixture(scope="module")
def huggingface(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A byte-level BPE with a chat template and no pad token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["What is two? One and one. user assistant"] * 5, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>")
    fast.chat_template = CHATML
    fast.save_pretrained(str(folder))
    return _huggingface(folder)


def _item(tokenizer: Any, row: dict, tmp_path: Path, **settings: Any) -> dict[str, Any]:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    config = PackingDatasetConfig(
        random_seed=1,
        sequence_length=128,
        tokenizer=tokenizer,
        blend=([str(path)], None),
        split="1,0,0",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        **settings,
    )
    source = VarlenDataset.build_low_level_dataset(str(path), config)
    return VarlenDataset(source, str(path), np.arange(1), 1, Split.train, config)[0]


def _learned(tokenizer: Any, item: dict[str, Any]) -> str:
    ids = item["labels"][item["loss_mask"].bool()].tolist()
    return MegatronTokenizer(tokenizer).decode(ids)


def test_sentencepiece_document_has_one_bos_and_one_eos(sentencepiece: Any, tmp_path: Path) -> None:
    adapter = MegatronTokenizer(sentencepiece)
    assert (adapter.bos_id, adapter.eos_id) == (1, 2)
    assert adapter.pad_id >= 0
    assert adapter.chat is None
    assert adapter.conversation is None
    item = _item(sentencepiece, {"text": "Packing removes padding."}, tmp_path)
    ids = [*item["tokens"].tolist(), item["labels"][-1].item()]
    assert ids[0] == 1
    assert ids[-1] == 2
    assert ids.count(1) == ids.count(2) == 1
    assert adapter.decode(ids[1:-1]) == "Packing removes padding."
    assert item["loss_mask"].all()


def test_sentencepiece_chat_learns_the_answer_and_its_end(sentencepiece: Any, tmp_path: Path) -> None:
    item = _item(sentencepiece, CHAT, tmp_path)
    ids = item["labels"][item["loss_mask"].bool()].tolist()
    assert ids[-1] == 2
    assert MegatronTokenizer(sentencepiece).decode(ids[:-1]).strip() == "One and one."
    assert item["loss_mask"][0] == 0


def test_huggingface_template_decides(huggingface: Any, tmp_path: Path) -> None:
    adapter = MegatronTokenizer(huggingface)
    assert adapter.chat is not None
    assert adapter.pad_id == adapter.eos_id  # no pad token: EOS stands in (D8)
    item = _item(huggingface, CHAT, tmp_path)
    assert _learned(huggingface, item) == "One and one.<|im_end|>"
    whole = adapter.decode([*item["tokens"].tolist(), item["labels"][-1].item()])
    expected = "<|im_start|>user\nWhat is two?<|im_end|>\n<|im_start|>assistant\nOne and one.<|im_end|>\n"
    assert whole == expected


def test_null_tokenizer_knows_only_numbers(tmp_path: Path) -> None:
    null = MegatronsOwn.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=50)
    assert _item(null, {"text": " 1  2 3 "}, tmp_path)["tokens"].tolist() == [1, 2, 3]
    with pytest.raises(PackingError, match=r"rows\.jsonl:1"):
        _item(null, {"text": "one two"}, tmp_path)


def test_null_tokenizer_reads_no_number_into_text_that_is_none() -> None:
    null = MegatronTokenizer(MegatronsOwn.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=50))
    for word in ("1_0", "+1", "-1", "50", "\u0661"):
        with pytest.raises(ValueError, match="is no number below 50"):
            null.encode(word)


def test_fingerprints_follow_the_content_not_the_place(sentencepiece: Any, huggingface: Any, tmp_path: Path) -> None:
    def of(tokenizer: Any) -> str:
        return MegatronTokenizer(tokenizer).fingerprint

    here = Path(str(files("mistral_common") / "data" / "tokenizer.model.v1"))
    copied = tmp_path / "other_name.model"
    copied.write_bytes(here.read_bytes())
    assert of(_sentencepiece(copied)) == of(sentencepiece)
    folder = tmp_path / "copy"
    huggingface._tokenizer.tokenizer.save_pretrained(str(folder))
    assert of(_huggingface(folder)) == of(huggingface)
    config = json.loads((folder / "tokenizer.json").read_text())
    first, second = config["model"]["merges"][:2]
    config["model"]["merges"][:2] = [second, first]
    (folder / "tokenizer.json").write_text(json.dumps(config))
    null = [MegatronsOwn.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=n) for n in (50, 51)]
    prints = [of(tokenizer) for tokenizer in (sentencepiece, huggingface, _huggingface(folder), *null)]
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize("adds", [False, True])
def test_bos_opens_texts_only_where_the_tokenizer_writes_it(huggingface: Any, adds: bool, tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    folder = tmp_path / "tokenizer"
    fast = copy.deepcopy(huggingface._tokenizer.tokenizer)
    fast.bos_token = "<|im_start|>"
    if adds:
        special = [("<|im_start|>", fast.bos_token_id)]
        fast.backend_tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=special)
    fast.save_pretrained(str(folder))
    item = _item(_huggingface(folder), {"text": "What is two?"}, tmp_path)
    assert item["tokens"].tolist().count(fast.bos_token_id) == int(adds)
    assert (item["tokens"][0] == fast.bos_token_id) == adds


def test_megatrons_own_sft_tokenizer_is_masked_by_turns(huggingface: Any, tmp_path: Path) -> None:
    """Its default format targets every token; the tokenizer's chat template, which it writes, tells the turns."""
    sft = MegatronsOwn.from_pretrained(
        tokenizer_path=huggingface.path, metadata_path={"library": "sft"}, prompt_format="default"
    )
    assert MegatronTokenizer(sft).conversation is not None
    item = _item(sft, CHAT, tmp_path)
    assert _learned(sft, item) == "One and one.<|im_end|>"


def test_a_chat_template_that_is_not_used_is_spoken_of(sentencepiece: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not used" not in MegatronTokenizer(sentencepiece).name
    monkeypatch.setattr(sentencepiece, "chat_template", CHATML)
    adapter = MegatronTokenizer(sentencepiece)
    assert adapter.chat is None
    assert "its chat template not used" in Encoder(adapter, 9).describe()


def test_tokenizer_without_an_end_is_refused(sentencepiece: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(sentencepiece._tokenizer), "eod", property(lambda self: None))
    monkeypatch.setattr(type(sentencepiece), "eod", property(lambda self: None))
    with pytest.raises(ConfigError, match="no end-of-document token"):
        MegatronTokenizer(sentencepiece)
