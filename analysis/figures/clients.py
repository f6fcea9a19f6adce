"""What a client measured beside what its server did: distributions over each other, and how far requests are apart."""

from __future__ import annotations

import numpy as np

from analysis.clients.beside import Beside, Measure
from analysis.clients.content import MEASURES
from analysis.figures.axis import spread
from analysis.statistics.thin import Ints, cdf
from cbsim.draw.chart import BLACK, Chart, Edge, Floats, Line, Mark, Panel, Points, Style, series
from cbsim.draw.units import Unit, unit
from cbsim.results.terminal import shown

CLIENT, SERVER, APART = series(1), series(0), series(2)
SHARES = {"p50": 0.5, "p99": 0.99}


def charts(compared: Beside, number: int) -> list[Chart]:
    """Of one file, the `number`th; of several a chart each."""
    panels = [_distributions(compared, measure) for measure in _said(compared)]
    says = f"Share of values up to x, in seconds of the client. {compared.client.tool} lists "
    says += "each request." if compared.client.requests is not None else "no requests: its percentiles are marked."
    made = [Chart(f"client-{number}", f"{compared.client.path.name}: client and server", says, panels, columns=2)]
    apart = [_apart(measure) for measure in compared.measures.values() if len(measure.apart_s)]
    if apart:
        says = f"The client's value less the server's, of {compared.pairs:,} requests paired by {compared.paired_by}."
        title = f"{compared.client.path.name}: how far apart"
        made.append(Chart(f"apart-{number}", title, says, apart, columns=len(apart)))
    return made


def _said(compared: Beside) -> list[Measure]:
    return [measure for measure in compared.measures.values() if measure.client and measure.server]


def _distributions(compared: Beside, measure: Measure) -> Panel:
    server = measure.server_s
    client = compared.client.values(measure.name)
    told = np.array([measure.client[name] for name in SHARES if name in measure.client])
    drawn = unit(float(max(server.max(), (client if len(client) else told).max(initial=0.0))))
    marks: list[Mark] = [_curve("server", server, measure.server_counts, drawn, SERVER)]
    if len(client):
        marks.append(_curve("client", client, None, drawn, CLIENT))
    else:
        names = [name for name in SHARES if name in measure.client]
        texts = [f"client: {name} {shown(measure.client[name], 's')}" for name in names]
        heights = np.array([SHARES[name] for name in names])
        marks.append(Points("client", told / drawn.seconds, heights, CLIENT, texts))
    log = spread([server, client])
    return Panel(marks, drawn.name, "share", MEASURES[measure.name], x_log=log, y_range=(0.0, 1.03))


def _curve(name: str, values: Floats, counts: Ints | None, drawn: Unit, style: Style) -> Line:
    x, share = cdf(values, counts)
    return Line(name, np.append(x[:1], x) / drawn.seconds, np.append(0.0, share), style, step=True)


def _apart(measure: Measure) -> Panel:
    drawn = unit(float(np.abs(measure.apart_s).max()))
    marks: list[Mark] = [
        Edge("", 0.0, Style(BLACK, "dashed")),
        _curve("client - server", measure.apart_s, None, drawn, APART),
    ]
    return Panel(marks, drawn.name, "share", MEASURES[measure.name], y_range=(0.0, 1.03))
