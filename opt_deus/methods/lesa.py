"""LESA (Yang et al. 2025, "Learnable LLM Layer Scaling-Up"): small networks predict the weights of a new layer.

Per weight, the matrices of all L layers side by side, (out, L x in), are U S [V_1' ... V_L'] (singular value
decomposition). A network learns V_l from V_(l-1) and V_(l+1); the new layer between l and l+1 is U S times what it
makes of V_l and V_(l+1). Defaults are the released notebooks': a sample is a singular direction's `in` entries of one
layer, and a new layer starts as a copy of layer 0, of which all but the seven matrices stays.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from tqdm import tqdm

from opt_deus.methods import Base, Diagnostics, Layer, Parents, diagnose, mean_of

NORMS = ("layer0", "neighbours")
SAMPLES = ("directions", "inputs")


@dataclass(frozen=True)
class Recipe:
    """How a network is trained; the defaults are the released code's.

    samples: directions (rows of V_l', one singular direction each) or inputs (rows of V_l, one input column each).
    norm_weight: w in the loss (1 - w) x mean square + w x (difference of the batches' Frobenius norms) squared.
    """

    samples: str = "directions"
    epochs: int = 10
    hidden_size: int = 256
    norm_weight: float = 0.0005
    batch_size: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        if self.samples not in SAMPLES:
            raise ValueError(f"align.samples={self.samples}: unknown; choose one of {', '.join(SAMPLES)}.")
        if not 0 <= self.norm_weight <= 1:
            raise ValueError(f"align.norm_weight={self.norm_weight}: a share of the loss, 0 <= weight <= 1.")

    def turned(self, right: Tensor) -> Tensor:
        """A right factor (rank, in) as samples (samples, width), and back: the same turn."""
        return right if self.samples == "directions" else right.T


@dataclass(frozen=True)
class Factors:
    """U (out, rank) and S (rank,), largest first, float64; rank is below `out` where directions are numerically 0."""

    left: Tensor
    values: Tensor

    def right(self, matrix: Tensor) -> Tensor:
        """V_l' (rank, in) of a layer's matrix (out, in)."""
        return self.left.T @ matrix.to(self.left.device, torch.float64) / self.values[:, None]

    def matrix(self, right: Tensor) -> Tensor:
        return (self.left * self.values) @ right.to(self.left.device, torch.float64)


def factorise(base: Base, name: str, device: torch.device | str) -> Factors:
    """U and S of all layers' matrices side by side, from the sum of their Gram matrices: (out, out) is all it holds.

    A direction is dropped where its squared singular value is below max(out, L x in) x 2^-52 of the largest: there a
    Gram matrix holds rounding only (singular values below about 2e-6 of the largest). ValueError if all are 0.
    """
    gram, columns = 0, 0
    for layer in range(base.num_layers):
        matrix = base.weight(layer, name).to(device, torch.float64)
        gram, columns = gram + matrix @ matrix.T, columns + matrix.shape[1]
    energies, left = torch.linalg.eigh(gram)
    kept = energies > max(len(gram), columns) * torch.finfo(torch.float64).eps * energies[-1]
    if not kept.any():
        raise ValueError(f"align=lesa: {name} is 0 in every layer, so there is nothing to learn; choose another align.")
    left, energies = left[:, kept].flip(1), energies[kept].flip(0)
    peaks = left.gather(0, left.abs().argmax(0, keepdim=True))  # the sign of a direction is free: fixed here
    return Factors(left * peaks.sign(), energies.sqrt())


def right_factors(base: Base, name: str, factors: Factors, recipe: Recipe) -> Tensor:
    """Every layer's right factor as samples (L, samples, width), float32: as large as all layers' matrices."""
    shape = recipe.turned(factors.right(base.weight(0, name))).shape
    rights = torch.empty(base.num_layers, *shape, device=factors.left.device)
    for layer in range(base.num_layers):
        rights[layer] = recipe.turned(factors.right(base.weight(layer, name)))
    return rights


def network(width: int, recipe: Recipe, generator: torch.Generator, device: torch.device | str) -> nn.Sequential:
    """Two neighbours' samples (n, 2 x width) -> (n, width); torch's own uniform initialisation, from the generator."""
    sizes = (2 * width, recipe.hidden_size, recipe.hidden_size, width)
    # skip_init: torch's own start would draw from the global state
    first, second, third = (nn.utils.skip_init(nn.Linear, *pair) for pair in zip(sizes, sizes[1:], strict=False))
    for linear in (first, second, third):
        for parameter in linear.parameters():
            nn.init.uniform_(parameter, -(linear.in_features**-0.5), linear.in_features**-0.5, generator=generator)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third).to(device)


def loss_terms(outputs: Tensor, targets: Tensor, norm_weight: float) -> tuple[Tensor, Tensor]:
    """The two weighted terms of a batch's loss: mean square error, and squared difference of Frobenius norms."""
    apart = (outputs.norm() - targets.norm()).square()
    return (1 - norm_weight) * (outputs - targets).square().mean(), norm_weight * apart


def train(
    rights: Tensor, recipe: Recipe, generator: torch.Generator, centres: Sequence[int] | None = None
) -> nn.Sequential:
    """A network that predicts layer l's samples from those of l-1 and l+1, trained; it draws from the generator only.

    rights: (L, samples, width). centres: the l that are learnt, all inner layers by default.
    """
    num_layers, count, width = rights.shape
    rows = rights.flatten(0, 1)
    middle = torch.tensor(list(range(1, num_layers - 1) if centres is None else centres))
    targets = (middle[:, None] * count + torch.arange(count)).flatten()
    built = network(width, recipe, generator, rights.device)
    rates = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay}
    optimizer = torch.optim.AdamW(built.parameters(), **rates, fused=True)
    with torch.enable_grad():
        for _ in range(recipe.epochs):
            order = targets[torch.randperm(len(targets), generator=generator)].to(rights.device)
            for batch in order.split(recipe.batch_size):
                outputs = built(torch.cat([rows[batch - count], rows[batch + count]], 1))
                optimizer.zero_grad()
                sum(loss_terms(outputs, rows[batch], recipe.norm_weight)).backward()
                optimizer.step()
    return built.eval().requires_grad_(False)


def generator_for(seed: int, name: str) -> torch.Generator:
    """Random numbers of one weight's network: its start and the order of its samples."""
    return torch.Generator().manual_seed(zlib.crc32(f"lesa {seed} {name}".encode()))


def moments(predicted: Tensor, true: Tensor) -> Tensor:
    """(3,) float64: <p, p>, <p, t> and <t, t>, from which every measure of a fit follows; sums add up over layers."""
    predicted, true = predicted.double(), true.double()
    return torch.stack([(predicted * predicted).sum(), (predicted * true).sum(), (true * true).sum()])


@dataclass(frozen=True)
class Predictor:
    """One weight's factors and its trained network. numbers: how well it fits what it was trained on."""

    factors: Factors
    built: nn.Sequential
    recipe: Recipe
    numbers: dict[str, float]

    def between(self, lower: Tensor, upper: Tensor) -> Tensor:
        """The matrix (out, in) that the network puts between two layers' matrices, float64."""
        pair = [self.recipe.turned(self.factors.right(matrix)).float() for matrix in (lower, upper)]
        return self.factors.matrix(self.recipe.turned(self.built(torch.cat(pair, 1))))


def fit(base: Base, name: str, recipe: Recipe, device: torch.device | str) -> Predictor:
    """Learns one weight from all inner layers of the base, with the base's seed."""
    factors = factorise(base, name, device)
    rights = right_factors(base, name, factors, recipe)
    built = train(rights, recipe, generator_for(base.seed, name))
    triples = zip(rights, rights[1:], rights[2:], strict=False)
    pp, pt, tt = sum(moments(built(torch.cat([low, up], 1)), middle) for low, middle, up in triples).tolist()
    square = sum(layer.double().square().sum().item() for layer in rights) / rights.numel()
    numbers = {
        "rank": len(factors.values),
        "zero_mean_square": square,  # of an entry, over all layers: what predicting 0 costs
        "zero_norm_term": recipe.norm_weight * recipe.batch_size * rights.shape[-1] * square,  # and its share of w
        "training_r2": (2 * pt - pp) / tt,
        "training_cosine": pt / (pp * tt) ** 0.5 if pp else 0.0,
        "training_norm_ratio": (pp / tt) ** 0.5,
    }
    return Predictor(factors, built, recipe, numbers)


def lesa(
    parents: Parents,
    norms: str = "layer0",
    samples: str = "directions",
    epochs: int = 10,
    hidden_size: int = 256,
    norm_weight: float = 0.0005,
) -> tuple[Layer, Diagnostics]:
    """What the base's networks, trained once for all slots, put between the parents.

    norms: the vectors (norms' weights, biases) are layer 0's, as the released loader leaves them, or the neighbours'
    mean. The other knobs: Recipe. ValueError where there is no base or it has fewer than 3 layers.
    """
    base, recipe = parents.base, Recipe(samples, epochs, hidden_size, norm_weight)
    if norms not in NORMS:
        raise ValueError(f"align.norms={norms}: unknown; choose one of {', '.join(NORMS)}.")
    if base is None or base.num_layers < 3:
        raise ValueError(f"align=lesa: {parents.where}: it learns from a whole base of 3 layers or more; choose avg.")
    layer, diagnostics = {}, {}
    for weight in tqdm(parents.weights, desc="lesa", unit="weight", disable=None, leave=False):
        name, above = weight.name, parents.upper[weight.name]
        if weight.columns is None and norms == "layer0":
            layer[name] = base.weight(0, name).to(above.device, above.dtype, copy=True)
        elif weight.columns is None:
            layer[name] = mean_of(parents.pair(name)[0], parents, name)
        else:
            learnt = base.once(("lesa", name, recipe), partial(fit, base, name, recipe, parents.device))
            pair = parents.pair(name)
            made = learnt.between(*pair)
            size = sum(matrix.norm().item() for matrix in pair) / 2
            ratio = made.norm().item() / size if size else None
            layer[name] = made.to(above.device, above.dtype)
            diagnostics[name] = diagnose("lesa", **learnt.numbers, norm_ratio=ratio)
    return layer, diagnostics
