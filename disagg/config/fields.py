"""What settings are made of: a section, and ranges that several fields have."""

from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
)

from disagg.errors import ConfigError
from disagg.tls.addresses import parse_ports

Port = Annotated[int, Field(ge=0, le=65535)]
Share = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
Milliseconds = Annotated[int, Field(ge=1, le=24 * 3_600_000)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
HostPort = Annotated[str, Field(pattern=r"^[^\s:/]+:[1-9][0-9]{0,4}$")]


def _checked_ports(text: str) -> str:
    try:
        parse_ports(text)
    except ConfigError as error:
        raise ValueError(error.message) from None
    return text


Ports = Annotated[
    str,
    BeforeValidator(lambda given: str(given) if type(given) is int else given),
    AfterValidator(_checked_ports),
]


class Section(BaseModel):
    """One section of the settings; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
