"""Records of Gram matrices and directions, which plain autograd of PyTorch wrote."""

from pathlib import Path

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("safetensors")

from kfac_core import RecordError
from kfac_core_conformance.records import check_record, read_record

FOLDER = Path(__file__).parents[1] / "records" / "samples"
NAMES = "autograd_images", "autograd_tokens"


@pytest.mark.parametrize("name", NAMES)
def test_a_record_agrees(backend, dtype, name):
    record = read_record(FOLDER / f"{name}.safetensors")

    verdicts = check_record(record, backend=backend.selection, dtype=dtype)

    assert [v.operation for v in verdicts] == ["samples.gram", "samples.direction"]
    assert all(v.agrees for v in verdicts), verdicts


def test_one_record_has_fewer_rows_than_parameters_and_one_has_more():
    signs = set()
    for name in NAMES:
        record = read_record(FOLDER / f"{name}.safetensors")
        sizes = [
            sum(x.size for x in vector.values())
            for vector in record.samples.direction.values()
        ]
        signs.add(record.samples.residuals.size < sum(sizes))
    assert signs == {True, False}


def test_a_record_without_its_residuals_is_refused(tmp_path):
    from safetensors import safe_open
    from safetensors.numpy import save_file

    with safe_open(FOLDER / f"{NAMES[1]}.safetensors", framework="np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    del tensors["samples.residuals"]
    save_file(tensors, tmp_path / "a.safetensors", metadata=metadata)

    with pytest.raises(RecordError, match=r"samples\.residuals"):
        read_record(tmp_path / "a.safetensors")
