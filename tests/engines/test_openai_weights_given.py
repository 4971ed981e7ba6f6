"""What servers may be given as weights: checkpoints that fit, live tensors; the rest is refused before one sees it."""

import asyncio
import json
import os
import struct
from pathlib import Path
from typing import Any

import anyio
import pytest

from groupstate.engines.openai import OpenAIEngine
from groupstate.errors import EngineError
from tests.engines.http_server import HttpServer


def write_checkpoint(folder: Path, **shapes: list[int]) -> Path:
    """A folder of safetensors whose values nobody reads."""
    header, stop = {}, 0
    for name, shape in shapes.items():
        start, stop = stop, stop + 4 * shape[0]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}
    data = json.dumps(header).encode()
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data + bytes(stop))
    return folder


async def test_a_checkpoint_that_does_not_fit_is_never_shown_to_a_server(server: HttpServer, tmp_path: Path) -> None:
    server.root = str(write_checkpoint(tmp_path / "v1", a=[2], b=[3]))
    bad = {
        "lacks 'b'": write_checkpoint(tmp_path / "lacks", a=[2]),
        "'c', which the model doesn't have": write_checkpoint(tmp_path / "unknown", a=[2], b=[3], c=[1]),
        "'b' of version 2 has shape": write_checkpoint(tmp_path / "shape", a=[2], b=[4]),
    }
    async with OpenAIEngine(server.url, weight_version=1) as engine:
        for complaint, folder in bad.items():
            with pytest.raises(EngineError, match=f"{complaint}.*; version 1 stays"):
                await engine.publish_weights(folder, 2)
        await engine.publish_weights(write_checkpoint(tmp_path / "v2", a=[2], b=[3]), 2)

    assert [call for call in server.calls if "rpc" in call] == ["POST /collective_rpc"]
    assert server.weights == str(tmp_path / "v2")


async def test_the_first_checkpoint_that_was_taken_is_the_measure_of_the_next(
    server: HttpServer, tmp_path: Path
) -> None:
    async with OpenAIEngine(server.url, weight_version=1) as engine:
        await engine.publish_weights(write_checkpoint(tmp_path / "v2", a=[2]), 2)
        with pytest.raises(EngineError, match="version 2 stays"):
            await engine.publish_weights(write_checkpoint(tmp_path / "v3", b=[2]), 3)


async def test_what_is_neither_tensors_nor_a_folder_is_refused(server: HttpServer) -> None:
    async with OpenAIEngine(server.url) as engine:
        weights: Any = [1]
        with pytest.raises(
            EngineError, match="version 1 is list; give tensors by name, or a checkpoint's folder; version"
        ):
            await engine.publish_weights(weights, 1)


async def test_live_weights_need_a_folder(server: HttpServer) -> None:
    async with OpenAIEngine(server.url) as engine:
        with pytest.raises(
            EngineError, match=r"version 1 is tensors, and servers read folders; .*weights_dir.*; version 0"
        ):
            await engine.publish_weights({"a": 1}, 1)


async def test_live_weights_become_a_folder_that_goes_when_the_next_is_there_or_the_engine_ends(
    server: HttpServer, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    from groupstate.engines.checkpoint import read_checkpoint

    folders = []
    server.script = lambda prompt_ids, weights: [1] * 60
    async with OpenAIEngine(server.url, weights_dir=tmp_path / "weights") as engine:
        for version in (1, 2):
            weights = {"a": torch.full((2, 3), float(version)), "b": torch.zeros(4, dtype=torch.bfloat16)}
            await engine.publish_weights(weights, version)
            folders.append(server.weights)
            headers = read_checkpoint(server.weights).headers
            assert {name: (header.dtype, header.shape) for name, header in headers.items()} == {
                "a": ("F32", (2, 3)),
                "b": ("BF16", (4,)),
            }
        with pytest.raises(EngineError, match=r"'a' of version 3 .*shape|lacks 'b'"):
            await engine.publish_weights({"a": torch.zeros(3)}, 3)
        with pytest.raises(EngineError, match="not finite"):
            await engine.publish_weights({"a": torch.full((2, 3), torch.nan), "b": torch.zeros(4)}, 3)
        assert os.listdir(tmp_path / "weights") == [Path(folders[1]).name]

    assert os.listdir(tmp_path / "weights") == []


async def test_a_checkpoint_that_was_published_as_a_folder_stays_when_the_engine_ends(
    server: HttpServer, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "step 1", a=[2])
    async with OpenAIEngine(server.url) as engine:
        await engine.publish_weights(folder, 1)

    assert (folder / "model.safetensors").exists()


async def test_the_folder_of_weights_in_force_stays_whoever_was_cancelled_meanwhile(
    server: HttpServer, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    async with OpenAIEngine(server.url, weights_dir=tmp_path) as engine:
        for version in range(1, 40):
            publishing = asyncio.create_task(engine.publish_weights({"a": torch.full((2,), float(version))}, version))
            await anyio.sleep(version * 0.0002)
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)

            assert len(os.listdir(tmp_path)) <= 1
            assert (server.weights == "as started") == (engine.weight_version == 0)
            if engine.weight_version:
                assert os.listdir(tmp_path) == [Path(server.weights).name]
        assert engine.weight_version > 0


@pytest.mark.parametrize("weights", [{"a": 1}, {"a": object()}])
async def test_what_is_no_tensor_is_named(server: HttpServer, tmp_path: Path, weights: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    async with OpenAIEngine(server.url, weights_dir=tmp_path) as engine:
        with pytest.raises(EngineError, match=r"'a' of version 1 is (int|object); it must be a tensor"):
            await engine.publish_weights(weights, 1)

    assert os.listdir(tmp_path) == []
