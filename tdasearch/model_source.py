"""Where a model is loaded from: a folder, or a hub id. Says at once what is wrong, also where there is no network."""

from __future__ import annotations

import re
from pathlib import Path

from tdasearch.errors import ModelError

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_SECONDS = 5.0
_CONFIGURATIONS = ("config.json", "adapter_config.json")


def must_stay_local(source: str) -> bool:
    """Check that a model can be there at all, with one short question to the hub: asking file by file retries for a minute.

    Args:
        source: Folder or hub id.

    Returns:
        Whether it must be loaded without asking the hub: a folder, or no answer from the hub (what was fetched before will do).

    Raises:
        ModelError: There is no such folder, it holds no model, or the hub has no such model.
    """
    path = Path(source)
    if path.is_dir():
        if not any((path / name).is_file() for name in _CONFIGURATIONS):
            raise ModelError(f"model {source!r}: expected a folder written by save_pretrained, found no config.json in it")
        return True
    if path.exists() or _HUB_ID.fullmatch(source) is None:
        found = "a file" if path.exists() else "nothing there"
        expected = "a folder written by save_pretrained, or a hub id"
        raise ModelError(f"model {source!r}: expected {expected}, found {found}: check the path")
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    try:
        HfApi().model_info(source, timeout=_SECONDS)
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"model {source!r}: found no such folder, and no such model on the hub: check the path or the id (a private model "
            "needs a login)"
        ) from error
    except HfHubHTTPError:
        return False  # the hub is there: it says more when it is asked for the files
    except Exception as error:  # whatever the network's library raises
        if not any(isinstance(try_to_load_from_cache(source, name), str) for name in _CONFIGURATIONS):
            raise ModelError(
                f"model {source!r}: found no such folder, nothing of that name fetched before, and no way to the hub "
                f"({str(error).splitlines()[0] if str(error) else type(error).__name__}): check the path, or the network"
            ) from error
        return True
    return False
