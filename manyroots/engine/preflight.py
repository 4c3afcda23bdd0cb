"""Quick checks of whether a start can work, before seconds are spent on one.

Takes settings; raises errors about the paths, adapters and devices that they name. Reads file names
and adapters' headers and asks the GPU's driver, and imports no torch. Other problems, such as a
model that a hub lacks, appear when the engine is built.
"""

from __future__ import annotations

import ctypes
import logging
import re
import tempfile
from pathlib import Path

from manyroots.config import DEFAULT_MODEL, EngineSettings, LoraSettings, ModelSettings
from manyroots.engine.adapter_folders import check_folders
from manyroots.engine.connectors import check_connectors
from manyroots.engine.weight_folders import check_weights_dirs
from manyroots.errors import AdapterError, ConfigError, ModelError
from manyroots.files.gguf_parts import model_files, model_name
from manyroots.lora.files.config import read_config
from manyroots.lora.files.folder import CONFIG_FILE, WEIGHTS_FILE, check_folder, find_file
from manyroots.lora.files.header import read_header
from manyroots.lora.files.opened import AdapterFile
from manyroots.process.progress import Display, told_to, track
from manyroots.store.backends.registry import check_storage
from manyroots.store.sources.address import is_address, looks_like_hub_id

logger = logging.getLogger("manyroots")

_MAX_SOCKET_PATH = 103
"""The system's limit, a few bytes lower on some."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def check_start(settings: EngineSettings, *, needed: str | None = None) -> None:
    """Raises ConfigError or ModelError. An unusable adapter is a warning, unless it is the `needed`
    one."""
    model = settings.model
    name = _check_model(model)
    if model.tokenizer is not None and not _HUB_ID.fullmatch(model.tokenizer):
        _check_path("--tokenizer", model.tokenizer)
    if model.chat_template is not None:
        _check_path("--chat-template", model.chat_template)
    if model.generation_config not in ("auto", "none", "vllm"):
        _check_path("--generation-config", model.generation_config)
    check_weights_dirs(model.weights_dirs)
    check_storage(settings.tiers)
    check_connectors(settings.tiers)
    _check_devices(model)
    _check_temporary_folder()
    check_folders(settings.lora, {name, model.served_model_name or name})
    with Display(is_on=model.progress_bars) as display, told_to(display):
        _check_adapters(settings.lora, needed)


def _check_model(settings: ModelSettings) -> str:
    """The model's own name."""
    name, path = settings.model, Path(settings.model).expanduser()
    if not path.exists():
        if name != DEFAULT_MODEL and (not _HUB_ID.fullmatch(name) or path.suffix == ".gguf"):
            raise ModelError(
                f"--model is {name!r}; there is no such file or folder, and it is not a hub id "
                "(owner/name). Check the path."
            )
        return name
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                f"--model is the file {path}; only .gguf files are loaded by themselves. For "
                "safetensors pass the folder with config.json."
            )
        return model_name(path)
    if not (path / "config.json").is_file() and len(model_files(path)) != 1:
        raise ModelError(
            f"{path} has neither a config.json nor exactly one .gguf file; point --model at a "
            "model's folder or at the .gguf file itself."
        )
    return path.resolve().name


def _check_path(flag: str, value: str) -> None:
    if not Path(value).expanduser().exists():
        raise ConfigError(f"{flag} is {value!r}; there is no such file or folder.")


def _check_temporary_folder() -> None:
    """The engine's socket is there."""
    try:
        with tempfile.TemporaryDirectory(prefix="manyroots-") as folder:
            length = len(f"{folder}/engine".encode())
    except OSError as error:
        raise ConfigError(
            f"no temporary folder can be written ({error}); name one with TMPDIR."
        ) from error
    if length > _MAX_SOCKET_PATH:
        raise ConfigError(
            f"the temporary folder {tempfile.gettempdir()} has too long a name for a socket in it "
            f"({length} bytes, at most {_MAX_SOCKET_PATH}); name a shorter one with TMPDIR."
        )


def _check_devices(settings: ModelSettings) -> None:
    if settings.device == "cpu" or (
        settings.device == "auto" and settings.tensor_parallel_size == 1
    ):
        return
    count = count_gpus()
    if count == 0 and settings.device == "cuda":
        raise ConfigError("--device is cuda, and there is no GPU here; use --device cpu.")
    if 0 < count < settings.tensor_parallel_size:
        raise ConfigError(
            f"--tensor-parallel-size is {settings.tensor_parallel_size}, and there are {count} "
            "GPUs here; lower it, or use --device cpu."
        )


def count_gpus() -> int:
    """From CUDA's driver, which respects CUDA_VISIBLE_DEVICES; 0 if there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def _check_adapters(settings: LoraSettings, needed: str | None) -> None:
    """By their configs and headers: adapters that no model could serve, or not within these
    limits."""
    modules = settings.lora_modules
    for module in track(modules, total=len(modules), label="Checking adapters"):
        try:
            _check_adapter(module.path, settings.max_lora_rank)
        except AdapterError as error:
            message = f"--lora-modules {module.name}={module.path} can't be used: {error}"
            if module.name == needed:
                raise ConfigError(message) from error
            # Its requests will be refused with this reason; all others can be served.
            logger.warning("%s", message)


def _check_adapter(path: str, max_rank: int) -> None:
    is_folder = Path(path).expanduser().is_dir()
    if is_address(path) or (looks_like_hub_id(path) and not is_folder):
        return  # its files are checked when they are fetched
    folder = check_folder(path, None)
    with AdapterFile(find_file(folder, CONFIG_FILE, None)) as file:
        config = read_config(file)
    with AdapterFile(find_file(folder, WEIGHTS_FILE, None)) as file:
        read_header(file)
    if config.rank > max_rank:
        raise AdapterError(
            f"its rank is {config.rank}; --max-lora-rank {max_rank} allows less. Raise it to "
            f"{config.rank}."
        )
