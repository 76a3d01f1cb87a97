"""What a folder leaves open: one stated rule each, and a warning that names the file."""

import json
import warnings

import pytest
import torch
from safetensors.torch import save_file

from nanoengine.config import EngineConfig
from nanoengine.loader.checkpoint import INDEX_NAME
from nanoengine.loader.resolve import resolve_model
from nanoengine.loader.weights import expected_tensors
from nanoengine.model.config import load_model_config
from nanoengine.model.decoder import full_forward
from nanoengine.worker.model_runner import load_decoder

RAW = {
    "model_type": "llama",
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    return tmp_path


@pytest.fixture
def said():
    """What loading says of a folder, without the folder's own name."""

    def load(folder):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            files = resolve_model(folder)
        return files, [str(warning.message).replace(f"{folder}/", "") for warning in caught]

    return load


def weights(folder, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_tensors(load_model_config(folder))
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def logits(files):
    config = EngineConfig(max_model_len=64, vocab_size=60, device="cpu", dtype="float32")
    with torch.inference_mode():
        return full_forward(
            load_decoder(files, "auto", config, torch.device("cpu")), list(range(40))
        )


def transformers_logits(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.arange(40)[None]).logits[0]


def shards(folder, state, *more):
    """Two shards with an index; more: tensors that lie in both, while the index has them in the first."""
    names = sorted(state)
    parts = [names[::2], names[1::2]]
    for i, part in enumerate(parts):
        tensors = {name: state[name] for name in part} | (
            {n: state[n] + 1 for n in more} if i else {}
        )
        save_file(tensors, folder / f"model-{i}.safetensors")
    index = {name: f"model-{i}.safetensors" for i, part in enumerate(parts) for name in part}
    (folder / INDEX_NAME).write_text(
        json.dumps({"weight_map": index | dict.fromkeys(more, "model-0.safetensors")})
    )


@pytest.mark.parametrize("stored", ["no head", "the embedding", "another", "another dtype"])
def test_a_stored_head_unties_if_it_is_another_matrix(folder, said, stored):
    state = weights(folder)
    generator = torch.Generator().manual_seed(9)
    heads = {
        "the embedding": state[EMBEDDING].clone(),
        "another": torch.randn(60, 32, generator=generator),
        "another dtype": torch.randn(60, 32, generator=generator).half(),
    }
    save_file(
        state | ({HEAD: heads[stored]} if stored in heads else {}), folder / "model.safetensors"
    )
    files, messages = said(folder)
    untied = stored.startswith("another")
    assert files.config.tie_word_embeddings is not untied
    assert len(messages) == untied and all(
        "config.json says tie_word_embeddings, but model.safetensors" in m for m in messages
    )
    torch.testing.assert_close(logits(files), transformers_logits(folder), rtol=1e-4, atol=1e-4)


def test_heads_in_different_files_are_compared_to_the_last_byte(folder, said):
    state = weights(folder)
    for change in (0.0, 1.0):
        head = state[EMBEDDING].clone()
        head[-1, -1] += change
        shards(folder, state | {HEAD: head})
        assert said(folder)[0].config.tie_word_embeddings is (change == 0.0)


def test_the_index_counts_and_a_stale_file_is_named(folder, said):
    state = weights(folder)
    shards(folder, state)
    plain = logits(said(folder)[0])
    save_file(weights(folder, seed=1), folder / "model.safetensors")
    files, messages = said(folder)
    assert messages == [f"model.safetensors is not read: {INDEX_NAME} counts. Remove one of them."]
    assert torch.equal(logits(files), plain)


def test_beside_model_safetensors_no_other_file_counts(folder, said):
    save_file(weights(folder), folder / "model.safetensors")
    assert said(folder)[1] == []
    save_file(weights(folder, seed=1), folder / "model-00001-of-00002.safetensors")
    assert said(folder)[1] == [
        "model-00001-of-00002.safetensors is not read: model.safetensors counts. Remove one of them."
    ]


def test_a_tensor_in_two_shards_is_that_of_the_index(folder, said):
    state = weights(folder)
    shards(folder, state)
    plain = logits(said(folder)[0])
    shards(folder, state, "model.embed_tokens.weight")
    files, messages = said(folder)
    assert messages == [
        f"model-1.safetensors holds 1 tensor(s) that {INDEX_NAME} does not look for there; "
        "they are not read: model.embed_tokens.weight"
    ]
    assert torch.equal(logits(files), plain)


def test_sampling_values_of_the_model_are_not_used_and_said(folder, said):
    save_file(weights(folder), folder / "model.safetensors")
    generation = folder / "generation_config.json"
    generation.write_text(
        json.dumps(
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 1.0, "eos_token_id": 3}
        )
    )
    files, messages = said(folder)
    assert files.config.eos_token_ids == (3,)
    assert messages == [
        "generation_config.json asks for temperature=0.6, top_k=20, which is not used: "
        "say it in SamplingParams(...)"
    ]
    generation.write_text(
        json.dumps({"do_sample": True, "temperature": 1.0, "eos_token_id": 3, "bos_token_id": 1})
    )
    assert said(folder)[1] == []


def test_an_adapter_is_not_applied_and_said(folder, said):
    save_file(weights(folder), folder / "model.safetensors")
    save_file({"lora": torch.zeros(1)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    messages = said(folder)[1]
    assert [message.split()[0] for message in messages] == [
        "adapter_model.safetensors",
        "adapter_config.json",
    ]
    (folder / "config.json").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"holds an adapter \(adapter_config\.json\) and no model: merge it"
    ):
        resolve_model(folder)


def test_what_is_damaged_is_left_to_the_loader(folder, said):
    files, messages = said(folder)
    assert messages == []
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors"):
        logits(files)
    (folder / "generation_config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"generation_config\.json must hold a JSON object"):
        resolve_model(folder)


@pytest.mark.parametrize(
    "shard",
    [
        "../outside.safetensors",
        "/tmp/x.safetensors",
        "a/../../x.safetensors",
        "",
        ".",
        "..\\x.safetensors",
        "C:\\x.safetensors",
        3,
        None,
        "x\0y",
    ],
)
def test_an_index_that_points_outside_its_folder_is_refused(folder, shard):
    save_file(weights(folder), folder.parent / "outside.safetensors")
    names = list(weights(folder))
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))
    with pytest.raises(
        ValueError,
        match=rf"{INDEX_NAME}: weight_map puts tensor model\.\S+ into .* no file of this folder",
    ):
        logits(resolve_model(folder))


def test_a_snapshot_of_links_into_blobs_is_loaded(folder, said, tmp_path):
    """As Hugging Face's cache lays models out: every file of a snapshot is a link out of its folder."""
    blobs, snapshot = folder / "blobs", folder / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    shards(folder, weights(folder))
    for i, file in enumerate(
        [folder / "config.json", folder / INDEX_NAME, *sorted(folder.glob("*.safetensors"))]
    ):
        file.rename(blobs / f"blob{i}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob{i}")
    files, messages = said(snapshot)
    assert messages == [] and logits(files).shape == (40, 60)
