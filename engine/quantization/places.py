"""Where the tensors of a checkpoint go in a model whose weights are quantised."""

from dataclasses import dataclass, field, replace

import torch

from engine.quantization.rounding import round_rows
from engine.weights.place import FLOATS, Place

_SCALE = "_scale"  # behind the name of the weight that it belongs to
_UNUSED = (".input_scale", ".output_scale", ".k_scale", ".v_scale")


@dataclass(frozen=True)
class RoundedPlace(Place):
    """For a checkpoint of floats: each row that comes is rounded to the type of `destination`, its scale kept too.

    Of weights that ranks split by columns each rank rounds its own part.
    """

    scale: torch.Tensor = field(kw_only=True)  # float32 [rows of destination, 1]

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """See `Place.dtypes`."""
        return FLOATS

    def put(self, first: int, values: torch.Tensor) -> None:
        """See `Place.put`."""
        if self.dim != 0:
            values = values.narrow(self.dim, self.start, self.destination.shape[self.dim])
        rounded, scale = round_rows(values, self.destination.dtype)
        start = first - self.rows.start
        self.destination.narrow(0, start, len(values)).copy_(rounded)
        self.scale.narrow(0, start, len(values)).copy_(scale)

    def window(self, first: int, count: int, dtype: torch.dtype) -> None:
        """None: see `Place`."""
        return None


@dataclass(frozen=True)
class SharedScalePlace(Place):
    """For the one scale of a whole weight: it becomes that of each row."""

    stored_shape: tuple[int, ...] = field(kw_only=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Place.shape`."""
        return self.stored_shape

    @property
    def rows(self) -> range:
        """See `Place.rows`."""
        return range(1)

    def put(self, first: int, values: torch.Tensor) -> None:
        """See `Place.put`."""
        self.destination.copy_(values.reshape(1, 1).expand_as(self.destination))

    def window(self, first: int, count: int, dtype: torch.dtype) -> None:
        """None: see `Place`."""
        return None


def rounded_places(places: dict[str, Place]) -> dict[str, Place]:
    """The places for a checkpoint that holds floats where the model has quantised weights and scales."""
    scales = {name.removesuffix(_SCALE): place for name, place in places.items() if name.endswith(_SCALE)}
    return {
        name: RoundedPlace(place.destination, place.dim, place.start, place.total, scale=scales[name].destination)
        if name in scales
        else place
        for name, place in places.items()
        if not name.endswith(_SCALE)
    }


def weight_scale_name(stored: str) -> str:
    """Our name of a tensor. What some checkpoints call an inverse scale is multiplied with all the same."""
    return stored.removesuffix("_inv") if stored.endswith(f".weight{_SCALE}_inv") else stored


def is_unused_scale(stored: str) -> bool:
    """Whether the tensor is a scale that checkpoints may have and nothing here needs."""
    return stored.endswith(_UNUSED)


def scale_place(place: Place, shape: tuple[int, ...]) -> Place:
    """The place for a stored scale of this shape: one of the whole weight, or one of each row, as [N] or [N, 1]."""
    if shape in ((), (1,), (1, 1)):
        return SharedScalePlace(place.destination, stored_shape=shape)
    return replace(place, destination=place.destination.squeeze(1)) if len(shape) == 1 else place
