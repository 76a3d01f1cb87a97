"""One rank's decoder: the same modules on fewer heads; model.layers says where the ranks meet."""

from __future__ import annotations

from nanoengine.config import EngineConfig
from nanoengine.loader.resolve import ModelFiles
from nanoengine.model.decoder import Decoder
from nanoengine.parallel.group import Group
from nanoengine.parallel.split import Split
from nanoengine.worker.device import pick_device
from nanoengine.worker.model_runner import load_decoder


def load_part(files: ModelFiles, config: EngineConfig, group: Group) -> ParallelDecoder:
    """This rank's part of the model, on its device."""
    split = Split(files.config, group.rank, group.size)
    make = lambda: ParallelDecoder(split, config.max_model_len, group)  # noqa: E731
    return load_decoder(files, "auto", config, pick_device(config.device), make, split.shard)


class ParallelDecoder(Decoder):
    """A Decoder of the size of this rank's part.

    ``config`` is the part's, vocab_size the whole model's. loaded_bytes: what load_weights was
    given, in the checkpoint's own format.
    """

    def __init__(self, split: Split, max_positions: int, group: Group):
        super().__init__(split.part(), max_positions, group)
        self.embed_tokens.first_token = split.tokens.start
        self.vocab_size = self.lm_head.vocab_size = split.config.vocab_size
        self.loaded_bytes = 0

    def load_weights(self, weights) -> None:
        super().load_weights(self._counted(weights))

    def _counted(self, weights):
        for name, value in weights:
            self.loaded_bytes += value.nbytes
            yield name, value
