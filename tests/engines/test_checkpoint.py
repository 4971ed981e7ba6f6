"""Weights as folders of safetensors files: what fits, and what doesn't before an engine is touched."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from groupstate.engines.checkpoint import Checkpoint, need_finite, need_fit, read_checkpoint, write_checkpoint
from groupstate.errors import EngineError

MODEL = {"embed.weight": torch.arange(12.0).reshape(4, 3), "norm.weight": torch.ones(3)}
WHAT = "the weights of version 7"


def folder(path: Path, table: dict[str, tuple[str, list[int]]], **config: Any) -> Path:
    """A checkpoint with these names, types and shapes, and no regard to values."""
    path.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in table.items():
        start, end = end, end + torch.Size(shape).numel() * {"BF16": 2, "F64": 8}.get(dtype, 4)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Checkpoint:
    return read_checkpoint(folder(tmp_path / "model", {"embed.weight": ("F32", [4, 3]), "norm.weight": ("BF16", [3])}))


@pytest.fixture
def tied(tmp_path: Path) -> Checkpoint:
    table = {"embed.weight": ("F32", [4, 3]), "norm.weight": ("F32", [3])}
    return read_checkpoint(folder(tmp_path / "tied", table, tie_word_embeddings=True))


def values(checkpoint: Checkpoint) -> dict[str, list[float]]:
    """What a file holds, read by its own header."""
    data = (checkpoint.folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    table = json.loads(data[8 : 8 + length])
    types = {"F32": torch.float32, "BF16": torch.bfloat16}
    found = {}
    for name, entry in table.items():
        if name != "__metadata__":
            start, end = (8 + length + at for at in entry["data_offsets"])
            tensor = torch.frombuffer(bytearray(data[start:end]), dtype=types[entry["dtype"]])
            found[name] = tensor.float().tolist()
    return found


def test_written_weights_have_the_names_shapes_and_types_of_the_model(model: Checkpoint, tmp_path: Path) -> None:
    written = write_checkpoint(MODEL, model, WHAT, tmp_path)

    assert read_checkpoint(written.folder).headers == model.headers
    assert values(written) == {name: tensor.flatten().tolist() for name, tensor in MODEL.items()}


def test_weights_that_are_no_block_of_memory_are_written_in_order(model: Checkpoint, tmp_path: Path) -> None:
    turned = torch.arange(12.0).reshape(3, 4).T

    written = write_checkpoint({**MODEL, "embed.weight": turned}, model, WHAT, tmp_path)

    assert values(written)["embed.weight"] == turned.flatten().tolist()


def test_weights_that_a_trainer_changes_as_it_likes_are_written(model: Checkpoint, tmp_path: Path) -> None:
    parameters = {name: torch.nn.Parameter(tensor.double()) for name, tensor in MODEL.items()}

    written = write_checkpoint(parameters, model, WHAT, tmp_path)

    assert values(written)["norm.weight"] == [1.0, 1.0, 1.0]


def test_written_weights_go_when_they_are_discarded_and_those_of_others_stay(model: Checkpoint, tmp_path: Path) -> None:
    written = write_checkpoint(MODEL, model, WHAT, tmp_path)
    written.discard()
    model.discard()

    assert not written.folder.exists()
    assert model.folder.exists()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"embed.weight": None}, "'embed.weight' of the weights of version 7 is a NoneType; it must be a tensor"),
        ({"embed.weight": torch.ones(3, 4)}, r"has shape \[3, 4\] \(12 values\); the model's has \[4, 3\]"),
        ({"head.weight": torch.ones(3)}, "version 7 has 'head.weight', which the model doesn't have"),
        ({"norm.weight": torch.tensor([1.0, torch.nan, 1.0])}, "'norm.weight' of .* has values that are not finite"),
        ({"norm.weight": torch.tensor([1.0, 1e39, 1.0], dtype=torch.float64)}, "are too large for bfloat16"),
        ({"norm.weight": torch.ones(3, dtype=torch.int64)}, "'norm.weight' of .* is of torch.int64 .*floating-point"),
        ({"norm.weight": torch.ones(3, dtype=torch.complex64)}, "is of torch.complex64"),
        ({"norm.weight": torch.ones(3, device="meta")}, "'norm.weight' of .* is on no device"),
        ({"norm.weight": torch.ones(3).to_sparse()}, "is of torch.float32 and torch.sparse_coo"),
        ({3: torch.ones(3), None: torch.ones(4)}, "has 3, None, which the model doesn't have"),
        ({"lm_head.weight": MODEL["embed.weight"].clone()}, "has 'lm_head.weight', which the model doesn't have"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_leave_no_file(
    changes: dict[str, Any], complaint: str, model: Checkpoint, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    with pytest.raises(EngineError, match=complaint):
        write_checkpoint({**MODEL, **changes}, model, WHAT, scratch)
    assert list(scratch.iterdir()) == []


def test_missing_weights_are_named_and_many_are_counted(tmp_path: Path) -> None:
    table: dict[str, tuple[str, list[int]]] = {f"layer.{number}": ("F32", [1]) for number in range(7)}
    model = read_checkpoint(folder(tmp_path / "model", table))

    with pytest.raises(EngineError, match=r"lacks 'layer.0', 'layer.1', 'layer.2', 'layer.3' and 3 more$"):
        write_checkpoint({}, model, WHAT, tmp_path)


def test_names_with_something_before_them_are_shown_beside_those_that_are_needed(tmp_path: Path) -> None:
    model = read_checkpoint(folder(tmp_path / "model", {"layer.0": ("F32", [1])}))

    with pytest.raises(
        EngineError, match=r"lacks 'layer\.0', and has '_orig_mod\.layer\.0', which the model doesn't have$"
    ):
        write_checkpoint({"_orig_mod.layer.0": torch.zeros(1)}, model, WHAT, tmp_path)


def test_a_shard_of_a_tensor_is_refused_with_what_would_be_whole(model: Checkpoint, tmp_path: Path) -> None:
    class Shard(torch.Tensor):
        def full_tensor(self) -> torch.Tensor:
            raise NotImplementedError

    with pytest.raises(EngineError, match=r"'embed.weight' of .* is a shard; give its full_tensor\(\)"):
        write_checkpoint({**MODEL, "embed.weight": torch.ones(4, 3).as_subclass(Shard)}, model, WHAT, tmp_path)


def test_a_second_name_of_the_same_memory_is_left_out(model: Checkpoint, tmp_path: Path) -> None:
    written = write_checkpoint({**MODEL, "lm_head.weight": MODEL["embed.weight"]}, model, WHAT, tmp_path)

    assert values(written).keys() == MODEL.keys()


def test_the_output_layer_of_a_tied_model_is_left_out(tied: Checkpoint, tmp_path: Path) -> None:
    written = write_checkpoint({**MODEL, "lm_head.weight": MODEL["embed.weight"].clone()}, tied, WHAT, tmp_path)

    assert values(written).keys() == MODEL.keys()


def test_quantized_weights_fit_no_tensor(tmp_path: Path) -> None:
    model = read_checkpoint(folder(tmp_path / "model", {"embed.weight": ("I32", [4, 3])}))

    with pytest.raises(EngineError, match=r"'embed.weight' is stored as I32, so the model is quantized"):
        write_checkpoint({"embed.weight": MODEL["embed.weight"]}, model, WHAT, tmp_path)


def test_a_scratch_folder_that_is_not_there_is_named(model: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"version 7 can't be written: .*nowhere"):
        write_checkpoint(MODEL, model, WHAT, tmp_path / "nowhere")


def test_a_folder_that_fits_is_taken_with_other_types_and_in_parts(model: Checkpoint, tmp_path: Path) -> None:
    path = folder(tmp_path / "parts", {"embed.weight": ("BF16", [4, 3])})
    (path / "model.safetensors").rename(path / "part-1.safetensors")
    folder(path, {"norm.weight": ("F32", [3])})
    (path / "model.safetensors").rename(path / "part-2.safetensors")

    need_fit(read_checkpoint(path), model, WHAT)


def test_files_beside_those_of_the_index_do_not_count(model: Checkpoint, tmp_path: Path) -> None:
    path = folder(tmp_path / "both", {"embed.weight": ("F32", [4, 3]), "norm.weight": ("F32", [3])})
    (path / "model.safetensors").rename(path / "one.safetensors")
    folder(path, {"consolidated.weight": ("F32", [4, 3])})
    index = {"weight_map": {"embed.weight": "one.safetensors", "norm.weight": "one.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))

    need_fit(read_checkpoint(path), model, WHAT)


def test_a_folder_of_another_model_is_refused(model: Checkpoint, tmp_path: Path) -> None:
    other = read_checkpoint(folder(tmp_path / "other", {"embed.weight": ("F32", [4, 6]), "norm.weight": ("F32", [3])}))

    with pytest.raises(EngineError, match=r"'embed.weight' of the weights of version 7 has shape \[4, 6\]"):
        need_fit(other, model, WHAT)


@pytest.mark.parametrize("dtype", ["I32", "BOOL", "F8_E4M3"])
def test_a_folder_of_another_kind_of_numbers_is_refused(dtype: str, model: Checkpoint, tmp_path: Path) -> None:
    other = read_checkpoint(folder(tmp_path / "other", {"embed.weight": (dtype, [4, 3]), "norm.weight": ("F32", [3])}))

    with pytest.raises(EngineError, match=f"'embed.weight' of .* is stored as {dtype}, and the model has F32"):
        need_fit(other, model, WHAT)


def test_quantized_weights_fit_those_that_are_quantized_in_the_same_way(tmp_path: Path) -> None:
    table = {"embed.weight": ("I32", [4, 3])}
    quantized = read_checkpoint(folder(tmp_path / "quantized", table))

    need_fit(read_checkpoint(folder(tmp_path / "same", table)), quantized, WHAT)
    need_finite(read_checkpoint(tmp_path / "same"), quantized, WHAT)
    with pytest.raises(EngineError, match="is stored as F32, and the model has I32"):
        need_fit(read_checkpoint(folder(tmp_path / "plain", {"embed.weight": ("F32", [4, 3])})), quantized, WHAT)


def written(path: Path, number: float, *, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """A checkpoint in which the number stands in the midst of others."""
    names = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16"}
    like = Checkpoint(path, read_checkpoint(folder(path / "like", {"norm.weight": (names[dtype], [3])})).headers)
    checkpoint = write_checkpoint({"norm.weight": torch.ones(3)}, like, WHAT, path)
    file = checkpoint.folder / "model.safetensors"
    data = file.read_bytes()
    one, size = torch.tensor([number], dtype=dtype).view(torch.uint8).numpy().tobytes(), dtype.itemsize
    file.write_bytes(data[: -2 * size] + one + data[-size:])
    return checkpoint


@pytest.mark.parametrize(
    ("dtype", "number", "complaint"),
    [
        (torch.float32, float("nan"), "'norm.weight' of .* has values that are not finite"),
        (torch.float32, float("-inf"), "'norm.weight' of .* has values that are not finite"),
        (torch.bfloat16, float("nan"), "not finite"),
        (torch.float64, 1e300, "too large for float32, in which the model has it"),
    ],
)
def test_a_folder_with_numbers_that_are_not_finite_is_refused(
    dtype: torch.dtype, number: float, complaint: str, tmp_path: Path
) -> None:
    needed = read_checkpoint(folder(tmp_path / "model", {"norm.weight": ("F32", [3])}))
    with pytest.raises(EngineError, match=complaint):
        need_finite(written(tmp_path, number, dtype=dtype), needed, WHAT)


@pytest.mark.parametrize("number", [0.0, 3e38])
def test_a_folder_with_finite_numbers_is_taken_however_large_they_are(number: float, tmp_path: Path) -> None:
    found = written(tmp_path, number)

    need_finite(found, found, WHAT)


def spoil(path: Path, data: bytes) -> Path:
    (path / "model.safetensors").write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "is no safetensors file: its header can't be read"),
        (b"PK\x03\x04 a zip file of some kind, perhaps", "is no safetensors file, or is cut short in its header"),
        (struct.pack("<Q", 2) + b"[]", "is no safetensors file: its header can't be read"),
        (struct.pack("<Q", 9) + b'{"a": {}}', "is no safetensors file: its header can't be read"),
    ],
)
def test_what_is_no_safetensors_file_is_said_to_be_none(data: bytes, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=complaint):
        read_checkpoint(spoil(folder(tmp_path / "model", {}), data))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": 3, "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": ["a"], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, "x"]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4]},
        {"dtype": "F32", "shape": [1], "data_offsets": None},
        {"dtype": "F32", "shape": [1]},
        [],
        None,
    ],
)
def test_a_header_of_nonsense_is_said_to_be_none(entry: Any, tmp_path: Path) -> None:
    text = json.dumps({"a": entry}).encode()
    with pytest.raises(EngineError, match="is no safetensors file: its header can't be read"):
        read_checkpoint(spoil(folder(tmp_path / "model", {}), struct.pack("<Q", len(text)) + text + bytes(8)))


@pytest.mark.parametrize("offsets", [[0, 0], [0, 8], [8, 4]])
def test_numbers_that_do_not_make_the_shape_are_found_by_the_header(offsets: list[int], tmp_path: Path) -> None:
    text = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    with pytest.raises(EngineError, match=r"bytes for 'a', which don't make \[1\] F32"):
        read_checkpoint(spoil(folder(tmp_path / "model", {}), struct.pack("<Q", len(text)) + text + bytes(8)))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", {})
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").mkdir()

    with pytest.raises(EngineError, match=r"model can't be read: .*Is a directory"):
        read_checkpoint(path)
    with pytest.raises(EngineError, match=r"can't be read|is no folder"):
        read_checkpoint("a\0b")


@pytest.mark.parametrize("weight_map", [[], {"a": 3}, "x"])
def test_an_index_of_nonsense_is_named(weight_map: Any, tmp_path: Path) -> None:
    path = folder(tmp_path / "model", {})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    with pytest.raises(EngineError, match=r"index.json has a weight_map that isn't one"):
        read_checkpoint(path)


def test_a_file_that_is_cut_short_is_found_by_its_header(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", {"embed.weight": ("F32", [4, 3])})
    data = (path / "model.safetensors").read_bytes()

    with pytest.raises(EngineError, match=rf"is cut short: it has {len(data) - 1} bytes of {len(data)}"):
        read_checkpoint(spoil(path, data[:-1]))


def test_a_part_that_the_index_names_and_is_not_there_is_named(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", {})
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part-2.safetensors"}}')

    with pytest.raises(EngineError, match=r"lacks 'part-2.safetensors', which its model.safetensors.index.json names"):
        read_checkpoint(path)


def test_a_config_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", {})
    (path / "config.json").write_text("{")

    with pytest.raises(EngineError, match=r"config.json is no JSON"):
        read_checkpoint(path)


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_a_folder_without_weights_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"is no folder|has no \*.safetensors"):
        read_checkpoint(tmp_path / name)
