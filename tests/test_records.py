"""Files: what is written is read back, and nothing is overwritten unasked."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowsim as fs
from flowsim import records


@pytest.fixture(scope="module")
def run():
    chain = fs.lazy_chain([0.7, 0.2, 0.1], 0.5)
    model = fs.AttentionModel.init(
        jax.random.key(0), vocab=3, width=2, key_width=1, scale=0.1
    )
    loss = fs.PopulationLoss(chain)
    return fs.gradient_flow(
        loss, model, t1=3.0, observe=lambda m: {"phi": m.attention_logits()}
    )


def test_a_trajectory_comes_back_bit_for_bit(run, tmp_path):
    path = tmp_path / "run.npz"
    fs.save_trajectory(run, path)
    back = fs.load_trajectory(path)
    assert isinstance(back.models, fs.AttentionModel)
    for old, new in zip(
        jax.tree.leaves((run.ts, run.models, run.losses, run.grad_norms)),
        jax.tree.leaves((back.ts, back.models, back.losses, back.grad_norms)),
        strict=True,
    ):
        np.testing.assert_array_equal(old, new)
    np.testing.assert_array_equal(back.observables["phi"], run.observables["phi"])
    assert back.outcome == fs.Outcome.reached_t1
    assert back.settings == run.settings and back.time_unit == run.time_unit
    assert back.stats["num_steps"] == int(run.stats["num_steps"])


def test_a_trajectory_reads_with_plain_numpy(run, tmp_path):
    path = tmp_path / "run.npz"
    fs.save_trajectory(run, path)
    with np.load(path, allow_pickle=False) as file:
        np.testing.assert_array_equal(file["models.W0"], run.models.W0)
        assert json.loads(str(file["header"]))["outcome"] == "reached_t1"


def test_xarray_names_dimensions_and_units(run):
    data = run.to_xarray()
    assert data["W0"].dims == ("flow_time", "token", "width")
    assert data["WK"].dims == ("flow_time", "width", "key_width")
    np.testing.assert_array_equal(data["loss"], run.losses)
    np.testing.assert_array_equal(data["flow_time"], run.ts)
    np.testing.assert_array_equal(data["observables.phi"], run.observables["phi"])
    assert data["loss"].attrs["units"] == "nats"
    assert data["flow_time"].attrs["units"] == "flow time"
    assert data.attrs["outcome"] == "reached t1"
    assert data.attrs["num_steps"] == int(run.stats["num_steps"])
    half = float(run.ts[-1]) / 2
    nearest = data.sel(flow_time=half, method="nearest")
    np.testing.assert_array_equal(nearest["W1"], run.models.W1[run.nearest(half)])


def test_xarray_takes_one_concrete_run_only(run):
    batch = jax.tree.map(lambda leaf: leaf[None], run)
    with pytest.raises(ValueError, match="one concrete run"):
        batch.to_xarray()


def test_other_structures_need_a_pattern_and_check_it(tmp_path):
    def objective(tree):
        return 0.5 * (jnp.sum(tree["a"] ** 2) + jnp.sum(tree["b"][0] ** 2))

    start = {"a": jnp.ones(2), "b": [jnp.ones(1)]}
    run = fs.gradient_flow(objective, start, t1=1.0)
    path = tmp_path / "run.npz"
    fs.save_trajectory(run, path)
    back = fs.load_trajectory(path, like=start)
    np.testing.assert_array_equal(back.models["b"][0], run.models["b"][0])
    assert run.to_xarray()["b.0"].dims == ("flow_time", "b.0_0")
    assert sorted(fs.load_trajectory(path).models) == ["a", "b.0"]
    with pytest.raises(ValueError, match="like has"):
        fs.load_trajectory(path, like={"a": jnp.ones(2)})


def test_a_foreign_file_is_refused_in_one_line(tmp_path):
    path = tmp_path / "other.npz"
    np.savez(path, x=np.ones(3))
    with pytest.raises(ValueError, match="not a trajectory") as caught:
        fs.load_trajectory(path)
    assert "\n" not in str(caught.value)


def test_an_unfinished_write_leaves_the_old_file(run, tmp_path, monkeypatch):
    path = tmp_path / "run.npz"
    fs.save_trajectory(run, path)
    before = path.read_bytes()

    def full_disk(file, **arrays):
        del arrays
        file.write(b"half of it")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez_compressed", full_disk)
    with pytest.raises(OSError, match="no space left"):
        fs.save_trajectory(run, path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["run.npz"]


def test_json_holds_no_nan(tmp_path):
    records.write_json(tmp_path / "x.json", {"x": np.array([1.0, np.nan, np.inf])})
    assert json.loads((tmp_path / "x.json").read_text()) == {"x": [1.0, None, None]}


def test_run_folders_are_replaced_only_when_asked_and_only_if_they_are_ours(tmp_path):
    folder = records.prepare_folder(tmp_path / "a" / "run")
    (folder / "summary.json").write_text("{}")
    (folder / "old").write_text("old")
    with pytest.raises(ValueError, match="--force"):
        records.prepare_folder(folder)
    records.prepare_folder(folder, force=True)
    assert not any(folder.iterdir())
    (folder / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="does not look like a run folder"):
        records.prepare_folder(folder, force=True)
    assert (folder / "thesis.tex").read_text() == "precious"
    with pytest.raises(ValueError, match="is a file"):
        records.prepare_folder(folder / "thesis.tex", force=True)


def test_a_chain_file_is_read_with_its_names(tmp_path):
    P = np.array([[0.9, 0.1], [0.3, 0.7]])
    path = tmp_path / "chain.npz"
    np.savez(path, P=P, pi=[0.75, 0.25], tokens=["on", "off"])
    chain = records.load_chain_file(path)
    np.testing.assert_allclose(chain.transition, P)
    assert chain.tokens == ("on", "off")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"Q": np.eye(2)}, "must hold the key P"),
        ({"P": np.ones((2, 2))}, "row"),
        ({"P": np.full((2, 2), 0.5), "pi": np.array([0.9, 0.1])}, "stationary"),
    ],
)
def test_wrong_chain_files_get_one_clear_line(tmp_path, arrays, message):
    path = tmp_path / "chain.npz"
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=message) as caught:
        records.load_chain_file(path)
    assert "\n" not in str(caught.value)


def test_a_markdown_table_lines_up():
    text = records.markdown_table([{"a": 1.5, "bb": "x|y"}, {"a": None, "bb": 2}])
    lines = text.splitlines()
    assert lines[0].startswith("| a ") and "x\\|y" in lines[2]
    assert len({len(line) for line in lines}) == 1
