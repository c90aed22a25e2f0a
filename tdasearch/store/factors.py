"""The fitted factors on disk: ``encoder.safetensors``, written whole, and named by its SHA-256.

Eigenvectors of activations that several modules read are stored once. No pickle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tdasearch.curvature import ModuleFactors
from tdasearch.errors import StoreError
from tdasearch.store.files import replacing, sha256_of

FILE_NAME = "encoder.safetensors"


def save_factors(index_path: Path, factors: Mapping[str, ModuleFactors]) -> str:
    """Write the factors (temporary file, fsync, rename).

    Args:
        index_path: The index's folder.
        factors: Each module's factors.

    Returns:
        The file's SHA-256: the encoder's fingerprint.

    Raises:
        StoreError: It cannot be written; the one that was there stays.
    """
    tensors: dict[str, torch.Tensor] = {}
    shared: dict[int, str] = {}
    readers: dict[str, str] = {}
    for name, part in factors.items():
        readers[name] = name
        if part.activation_eigenvectors is not None:
            readers[name] = shared.setdefault(id(part.activation_eigenvectors), name)
            tensors[f"{readers[name]}/activation_eigenvectors"] = part.activation_eigenvectors
        if part.gradient_eigenvectors is not None:
            tensors[f"{name}/gradient_eigenvectors"] = part.gradient_eigenvectors
        tensors[f"{name}/eigenvalues"] = part.eigenvalues
        tensors[f"{name}/damping"] = torch.tensor(part.damping, dtype=torch.float64)
    path = index_path / FILE_NAME
    try:
        with replacing(path) as temporary:
            whole = {key: tensor.contiguous().cpu() for key, tensor in tensors.items()}
            save_file(whole, temporary, {"readers": json.dumps(readers)})
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{path}: cannot be written: {error}; check free space and permissions, then run again") from error
    return sha256_of(path)


@dataclass(frozen=True, slots=True)
class FactorShape:
    """The shape of one module's factors.

    Attributes:
        out_dim: O.
        in_dim: I.
        rotated_out: Whether the outputs have an eigenbasis.
        rotated_in: Whether the inputs have one.
        leader: The module whose activation eigenbasis this one shares: itself, or another that reads the same tensor.
    """

    out_dim: int
    in_dim: int
    rotated_out: bool
    rotated_in: bool
    leader: str


def factor_shapes(index_path: Path) -> dict[str, FactorShape]:
    """Read the shapes of the factors, and none of their numbers.

    Args:
        index_path: The index's folder.

    Returns:
        Each module's.

    Raises:
        StoreError: The file is missing or damaged.
    """
    path = index_path / FILE_NAME
    try:
        with safe_open(path, framework="pt") as file:
            readers: dict[str, str] = json.loads(file.metadata()["readers"])
            present = set(file.keys())
            shapes = {name: file.get_slice(f"{name}/eigenvalues").get_shape() for name in readers}
    except (OSError, SafetensorError, KeyError, IndexError, TypeError, ValueError) as error:
        raise StoreError(f"{path}: not a file of factors: {error}; build the index again") from error
    return {
        name: FactorShape(
            out_dim=shapes[name][0],
            in_dim=shapes[name][1],
            rotated_out=f"{name}/gradient_eigenvectors" in present,
            rotated_in=f"{leader}/activation_eigenvectors" in present,
            leader=leader,
        )
        for name, leader in readers.items()
    }


def load_factors(index_path: Path, *, fingerprint: str, device: torch.device | str = "cpu") -> dict[str, ModuleFactors]:
    """Read the factors back.

    Args:
        index_path: The index's folder.
        fingerprint: The SHA-256 that the manifest names.
        device: Where to put them.

    Returns:
        Each module's factors; modules that read one tensor share one eigenvector tensor.

    Raises:
        StoreError: The file is missing, damaged, or not the one that the manifest names.
    """
    path = index_path / FILE_NAME
    found = sha256_of(path) if path.is_file() else ""
    if found != fingerprint:
        raise StoreError(
            f"{path}: expected SHA-256 {fingerprint[:16]}..., found {found[:16] + '...' if found else 'no such file'}; "
            "the codes of this index belong to the factors it was built with: restore the file from a copy, or build again"
        )
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            readers: dict[str, str] = json.loads(file.metadata()["readers"])
            present = set(file.keys())

            def eigenvectors(key: str) -> torch.Tensor | None:
                return file.get_tensor(key) if key in present else None

            activation_eigenvectors = {
                leader: eigenvectors(f"{leader}/activation_eigenvectors") for leader in set(readers.values())
            }
            return {
                name: ModuleFactors(
                    activation_eigenvectors=activation_eigenvectors[leader],
                    gradient_eigenvectors=eigenvectors(f"{name}/gradient_eigenvectors"),
                    eigenvalues=file.get_tensor(f"{name}/eigenvalues"),
                    damping=float(file.get_tensor(f"{name}/damping")),
                )
                for name, leader in readers.items()
            }
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path}: not a file of factors: {error}; build the index again") from error
