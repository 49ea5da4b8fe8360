"""Models of the Hugging Face hub, by their `org/name`."""

import re
from collections.abc import Callable
from pathlib import Path

from agentspec.errors import ModelError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

FILES = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model"]
"""What serving needs of a repository; weights in other formats stay where they are."""


def is_hub_id(name: str) -> bool:
    """Whether a model name has the form `org/name`."""
    return HUB_ID.fullmatch(name) is not None


def snapshot(name: str, download: Callable[..., str] | None = None) -> Path:
    """The repository's files in the hub's own cache; `download` stands in for the hub's client."""
    try:
        if download is None:
            from huggingface_hub import snapshot_download

            download = snapshot_download
        return Path(download(name, allow_patterns=FILES))
    except ImportError as error:
        raise ModelError(f"model {name}: a hub id needs: pip install 'agentspec-proxy[worker]'") from error
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"model {name}: cannot be fetched from the hub: {reason}; check the name and the network, "
            "or download it yourself and give the folder"
        ) from error
