"""A transformer split by hand and trained with GPipe, as in torch's pipelining tutorial."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

VOCAB, DIM, LAYERS, MICROBATCHES = 50, 16, 4, 4
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        layers = (
            nn.TransformerEncoderLayer(DIM, 2, 32, dropout=0.0, batch_first=True)
            for _ in range(LAYERS)
        )
        self.layers = nn.ModuleDict({str(index): layer for index, layer in enumerate(layers)})
        self.norm = nn.LayerNorm(DIM)
        self.output = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        hidden = self.tok_embeddings(tokens) if self.tok_embeddings else tokens
        for layer in self.layers.values():
            hidden = layer(hidden)
        hidden = self.norm(hidden) if self.norm else hidden
        return self.output(hidden).clone() if self.output else hidden


def manual_model_split(model):
    """Keeps only this rank's layers; the first rank has the embedding, the last the head."""
    share = LAYERS // world_size
    for index in range(LAYERS):
        if index // share != rank:
            del model.layers[str(index)]
    if rank > 0:
        model.tok_embeddings = None
    if rank < world_size - 1:
        model.norm = model.output = None
    return PipelineStage(model, rank, world_size, torch.device("cpu"))


def loss_fn(output, target):
    return nn.functional.cross_entropy(output.reshape(-1, VOCAB), target.reshape(-1))


dist.init_process_group("gloo")
torch.manual_seed(0)
stage = manual_model_split(Transformer())
x, y = torch.randint(VOCAB, (8, 6)), torch.randint(VOCAB, (8, 6))
schedule = ScheduleGPipe(stage, n_microbatches=MICROBATCHES, loss_fn=loss_fn)
if rank == 0:
    schedule.step(x)
elif rank == world_size - 1:
    losses = []
    output = schedule.step(target=y, losses=losses)
    print(f"losses: {[round(float(loss), 1) for loss in losses]}")
else:
    schedule.step()
dist.destroy_process_group()
