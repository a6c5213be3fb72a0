"""What the routes of a server share."""

from __future__ import annotations

import dataclasses

from sgljax_engine import Engine
from sgljax_engine.server.config import ServerConfig
from sgljax_engine.server.generation import Generation


@dataclasses.dataclass
class ServerContext:
    """One engine that is served.

    Attributes:
        engine: Answers.
        config: Limits and names.
        generation: The open requests.
        version_labels: Labels that clients gave to weight versions.
    """

    engine: Engine
    config: ServerConfig
    generation: Generation
    version_labels: dict[int, str] = dataclasses.field(default_factory=dict)
