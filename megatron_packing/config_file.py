"""How do flags get into a file? `configs/NAME.yaml` holds them as keys; the command line wins."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_packing.errors import ConfigError


def merge_flags(path: Path, argv: Sequence[str]) -> list[str]:
    """Flags of the file that `argv` does not set, followed by `argv`.

    In the file, `seq-length: 512` stands for `--seq-length 512` (underscores work too), `true` for a
    switch, a list for a flag with several values; `false` and `null` leave the flag out.

    Raises:
        ConfigError: the file is missing, is no mapping, sets a flag twice, or holds a nested value.
    """
    given = {word.split("=", 1)[0] for word in argv if word.startswith("--")}
    flags: list[str] = []
    for key, value in _load(path).items():
        flag = _flag(key)
        if flag not in given:
            flags += _as_words(path, flag, value)
    return [*flags, *argv]


def flags_left_out(path: Path) -> list[str]:
    """Flags that the file names only to say that they are not set: no parser will ever see how they are spelt.

    Raises:
        ConfigError: as `merge_flags`.
    """
    return [_flag(key) for key, value in _load(path).items() if value is None or value is False]


def _flag(key: Any) -> str:
    return "--" + str(key).replace("_", "-")


def _load(path: Path) -> dict[Any, Any]:
    import yaml

    if not path.is_file():
        raise ConfigError(f"--config {path}: no such file. Give a YAML file of flags, such as those in configs/.")
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: holds {type(content).__name__}; it must map flags to values.")
    # A dictionary keeps the last of equal keys and would hide the others: look at the keys as they were written.
    written = Counter(_flag(key.value) for key, _ in yaml.compose(text, Loader=yaml.SafeLoader).value)
    for flag, times in written.items():
        if times > 1:
            raise ConfigError(f"--config {path}: sets {flag} {times} times. Keep one of them.")
    return content


def _as_words(path: Path, flag: str, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    values = value if isinstance(value, list) else [value]
    if any(isinstance(item, dict | list) for item in values):
        raise ConfigError(f"--config {path}: {flag} holds a nested value; use a plain value or a flat list.")
    return [flag, *(str(item) for item in values)]
