"""What calls will look like, so that they can be prepared for before they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from deep_ep.errors import ConfigError

_SCALE_CHANNELS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeShape:
    """The shape of the dispatches and combines of one kind of layer.

    Attributes:
        hidden: Size of a token's row.
        num_topk: Top-k slots per token.
        num_experts: Experts on all ranks.
        num_max_tokens_per_rank: The most tokens that a rank sends in one call; in low-latency mode the
            `num_max_dispatch_tokens_per_rank` of the calls.
        is_low_latency: Whether the calls are those of low-latency mode.
        use_fp8: Whether rows are dispatched as float8_e4m3fn with a float32 scale for every 128 channels; if not, as
            bfloat16. Combines are bfloat16.
        num_sms: Of the config of normal calls; 0 is what `Buffer.num_sms` is then.

    Raises:
        ConfigError: If a number is out of range.

    Example:
        >>> decode = ExchangeShape(hidden=7168, num_topk=8, num_experts=256, num_max_tokens_per_rank=128,
        ...                        is_low_latency=True, use_fp8=True)
        >>> buffer = Buffer(group, low_latency_mode=True, preinitialize=True, shapes=[decode])
    """

    hidden: int
    num_topk: int
    num_experts: int
    num_max_tokens_per_rank: int
    is_low_latency: bool = False
    use_fp8: bool = False
    num_sms: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "num_sms" else 1
            if field.type == "bool":
                if not isinstance(value, bool):
                    raise ConfigError(f"{field.name} of a shape must be true or false, got {value!r}")
            elif not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{field.name} of a shape must be an integer of at least {least}, got {value!r}")

    @property
    def num_scales(self) -> int:
        """Return the scales of a row."""
        return -(-self.hidden // _SCALE_CHANNELS) if self.use_fp8 else 0

    def to_dict(self) -> dict[str, object]:
        """Return the fields."""
        return asdict(self)

    @staticmethod
    def of(choice: ExchangeShape | Mapping[str, Any]) -> ExchangeShape:
        """Return a shape as it is, or from its fields.

        Raises:
            ConfigError: If a field is missing or unknown.
        """
        if isinstance(choice, ExchangeShape):
            return choice
        try:
            return ExchangeShape(**choice)
        except TypeError as error:
            raise ConfigError(
                f"a shape must be an ExchangeShape or its fields, got {choice!r}: {error}",
                hint=f"the fields are {', '.join(field.name for field in fields(ExchangeShape))}",
            ) from None
