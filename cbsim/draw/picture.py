"""A chart that a notebook shows and that can be saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cbsim.draw import render
from cbsim.draw.chart import Chart
from cbsim.results.directory import RunError, write_whole

ENDINGS = (".png", ".svg")


@dataclass(frozen=True, slots=True)
class Picture:
    """Drawn when it is looked at."""

    chart: Chart

    def png(self) -> bytes:
        return render.png(self.chart)

    def _repr_png_(self) -> bytes:
        return self.png()

    def save(self, path: Path | str) -> Path:
        """Write it as .png or .svg, by the name. Raises RunError."""
        file = Path(path)
        if file.suffix not in ENDINGS:
            bound = f"expected a name that ends in {' or '.join(ENDINGS)}"
            raise RunError(f"{file}: got {file.suffix!r}, {bound}", file=file, value=file.suffix, bound=bound)
        try:
            write_whole(file, self.png() if file.suffix == ".png" else render.svg(self.chart))
        except OSError as error:
            raise RunError(f"{file}: cannot be written: {error.strerror or error}", file=file) from None
        return file
