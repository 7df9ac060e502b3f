"""Is the docstring corpus real, repeatable, and masked so that only the assistant's words are learnt?"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="the corpus trains a tokenizer; install megatron-packing[hf]")

SCRIPT = Path(__file__).parents[2] / "scripts" / "docstring_corpus.py"
LIMIT, VOCAB_SIZE = 200, 600


def load_script():
    # scripts/ is a folder of programs, not a package.
    spec = importlib.util.spec_from_file_location("docstring_corpus", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


corpus = load_script()


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return corpus.build_corpus(tmp_path_factory.mktemp("corpus"), vocab_size=VOCAB_SIZE, limit=LIMIT, seed=7)


@pytest.fixture(scope="module")
def conversations(paths):
    return [json.loads(line)["messages"] for line in paths.jsonl.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer(paths):
    # Set before the import, which reads it: the folder must be enough without a network.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        transformers = pytest.importorskip("transformers", reason="loads the folder; install megatron-packing[hf]")
        return transformers.AutoTokenizer.from_pretrained(str(paths.tokenizer_dir))


def entries_of(source, module="pkg.mod"):
    return {entry.name: entry for entry in corpus.entries_of_source(module, source.encode())}


# --- the pairs --------------------------------------------------------------------------------------------------------


def test_each_row_is_one_question_and_its_answer(conversations, paths):
    assert len(conversations) == LIMIT == paths.stats.pairs
    for messages in conversations:
        assert [turn["role"] for turn in messages] == ["user", "assistant"]
        assert all(turn["content"].strip() == turn["content"] != "" for turn in messages)
    answers = {messages[1]["content"] for messages in conversations}
    assert len(answers) == LIMIT


def test_questions_vary(conversations):
    openings = {messages[0]["content"].split("`")[0] for messages in conversations}
    assert len(openings) >= len(corpus.QUESTIONS)


def test_names_signatures_and_kinds():
    found = entries_of(
        '''
"""Module."""
def f(a, *, b=2):
    """Function."""
    def hidden(): "Never named."
class C:
    """Class."""
    def m(self, x): """Method."""
    def alone(self, /): "No arguments."
    @staticmethod
    def s(x, y): "Static."
    class Inner:
        async def deep(self): "  Deep.  "
if True:
    def g(): "Conditional."
def bare(): ...
def empty(): "   "
'''
    )
    assert {name: (entry.kind, entry.call, entry.doc) for name, entry in found.items()} == {
        "pkg.mod": ("module", "pkg.mod", "Module."),
        "pkg.mod.f": ("function", "pkg.mod.f(a, *, b=2)", "Function."),
        "pkg.mod.C": ("class", "pkg.mod.C", "Class."),
        "pkg.mod.C.m": ("method", "pkg.mod.C.m(x)", "Method."),
        "pkg.mod.C.alone": ("method", "pkg.mod.C.alone()", "No arguments."),
        "pkg.mod.C.s": ("method", "pkg.mod.C.s(x, y)", "Static."),
        "pkg.mod.C.Inner.deep": ("method", "pkg.mod.C.Inner.deep()", "Deep."),
        "pkg.mod.g": ("function", "pkg.mod.g()", "Conditional."),
    }


def test_a_long_signature_is_left_out():
    arguments = ", ".join(f"argument_{index}" for index in range(20))
    assert entries_of(f"def f({arguments}): 'Doc.'")["pkg.mod.f"].call == "pkg.mod.f()"


def test_compiled_modules_document_themselves_only():
    entries = {entry.name: entry for entry in corpus.entries_of_builtins()}
    assert entries["str.split"].call == "str.split(sep=None, maxsplit=-1)"
    assert entries["len"].kind == "function"
    assert entries["os.getpid"].call == "os.getpid()"
    # `site` puts these into builtins; they are not the interpreter's.
    assert not {"help", "exit", "copyright"} & entries.keys()


def test_a_replaced_hook_changes_nothing(monkeypatch):
    before = list(corpus.entries_of_builtins())
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    monkeypatch.setattr(sys, "excepthook", lambda *exception: None)
    assert list(corpus.entries_of_builtins()) == before
    assert "sys.excepthook" in {entry.name for entry in before}


def test_topics_are_read_without_importing():
    source = b"# a header\ntopics = {'with': 'The \"with\" statement\\n***\\n', 'in': 'text'}\n"
    assert [(entry.name, entry.kind, entry.doc) for entry in corpus.entries_of_topics(source)] == [
        ("with", "topic", 'The "with" statement\n***'),
        ("in", "topic", "text"),
    ]


def test_of_equal_texts_the_public_name_stays():
    entries = [
        corpus.Entry(name=name, kind="function", call=name, doc=doc)
        for name, doc in (("_a.f", "Same text."), ("z.f", "same  text."), ("z.g", "Other text."))
    ]
    assert [entry.name for entry in corpus.drop_duplicates(entries)] == ["z.f", "z.g"]


@pytest.mark.parametrize("doc", ["a lone \ud800", "says <|im_end|>"])
def test_texts_that_would_break_the_file_or_the_template_are_dropped(doc):
    assert not corpus.is_usable(corpus.Entry(name="f", kind="function", call="f", doc=doc))
    assert corpus.is_usable(corpus.Entry(name="f", kind="function", call="f", doc="fine"))


def test_sources_leave_out_tests_and_build_files(tmp_path):
    for name in ("a.py", "b/__init__.py", "b/test/t.py", "site-packages/s.py", "config-3/x.py", "_sysconfigdata_x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [module for module, _ in corpus.stdlib_sources(tmp_path)] == ["a", "b"]


def test_a_library_without_sources_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no Python sources"):
        corpus.stdlib_sources(tmp_path)


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def test_the_assistant_mask_covers_the_answer_and_its_end_and_nothing_else(tokenizer, conversations):
    for messages in conversations:
        answer = messages[1]["content"]
        encoded = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
        pairs = list(zip(encoded["input_ids"], encoded["assistant_masks"], strict=True))
        assert tokenizer.decode([token for token, learnt in pairs if learnt]) == answer + "<|im_end|>"
        rest = tokenizer.decode([token for token, learnt in pairs if not learnt])
        question = messages[0]["content"]
        assert rest == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n\n"


def test_every_assistant_turn_counts(tokenizer):
    turns = [("system", "Be brief."), ("user", "a?"), ("assistant", "b."), ("user", "c?"), ("assistant", "d.")]
    messages = [{"role": role, "content": content} for role, content in turns]
    encoded = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    learnt = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(learnt) == "b.<|im_end|>d.<|im_end|>"


def test_the_folder_names_its_special_tokens(tokenizer, paths):
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|pad|>")
    assert tokenizer.convert_tokens_to_ids(list(corpus.SPECIAL_TOKENS)) == [0, 1, 2, 3]
    assert len(tokenizer) == paths.stats.vocab_size == VOCAB_SIZE


def test_any_text_survives(tokenizer):
    text = "  naïve 文字 \U0001f40d\ttab\n\n  end "
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_prompt_ends_where_the_answer_starts(tokenizer, conversations):
    question, answer = conversations[0]
    prompt = tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([question, answer], tokenize=False)
    assert whole == prompt + answer["content"] + "<|im_end|>\n"


def test_counts_are_those_of_the_template(tokenizer, conversations, paths):
    counts = [len(tokenizer.apply_chat_template(m, return_dict=True)["input_ids"]) for m in conversations]
    stats = paths.stats
    assert (stats.tokens, stats.longest) == (sum(counts), max(counts))
    assert stats.mean == round(sum(counts) / LIMIT, 1)
    assert (stats.p50, stats.p95) == (sorted(counts)[LIMIT // 2 - 1], sorted(counts)[LIMIT * 95 // 100 - 1])


# --- building ---------------------------------------------------------------------------------------------------------


def test_another_process_builds_the_same_bytes(paths, tmp_path):
    # Another process hashes texts with another seed, so that an order that hangs on a set or dict of them would show.
    arguments = ["--out", tmp_path, "--vocab-size", VOCAB_SIZE, "--limit", LIMIT, "--seed", 7]
    done = subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"{LIMIT}" in done.stdout
    built = {file.relative_to(tmp_path): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    root = paths.jsonl.parent
    assert built == {file.relative_to(root): file.read_bytes() for file in root.rglob("*") if file.is_file()}
    assert len(built) == 4


def test_an_equal_call_reuses_and_a_damaged_file_does_not(paths, monkeypatch):
    def collect(progress):
        raise RuntimeError("builds anew")

    monkeypatch.setattr(corpus, "_collect", collect)
    root = paths.jsonl.parent
    before = {file: file.read_bytes() for file in root.rglob("*") if file.is_file()}
    options = {"vocab_size": VOCAB_SIZE, "limit": LIMIT, "seed": 7}
    try:
        assert corpus.build_corpus(root, **options) == paths
        for change in ({"seed": 8}, {"limit": LIMIT + 1}, {"vocab_size": VOCAB_SIZE + 1}):
            (root / "manifest.json").write_bytes(before[root / "manifest.json"])
            with pytest.raises(RuntimeError, match="builds anew"):
                corpus.build_corpus(root, **options | change)
        (root / "manifest.json").write_bytes(before[root / "manifest.json"])
        paths.jsonl.write_bytes(before[paths.jsonl][:-1])
        with pytest.raises(RuntimeError, match="builds anew"):
            corpus.build_corpus(root, **options)
        # An interrupted build leaves nothing behind that looks whole.
        assert not (root / "manifest.json").exists()
    finally:
        for file, content in before.items():
            file.write_bytes(content)


@pytest.mark.parametrize(("options", "why"), [({"vocab_size": 259}, "at least 260"), ({"limit": 0}, "at least 1 pair")])
def test_options_that_cannot_work(tmp_path, options, why):
    with pytest.raises(ValueError, match=why):
        corpus.build_corpus(tmp_path, **options)
    assert not list(tmp_path.iterdir())
