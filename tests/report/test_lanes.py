"""The page of lanes."""

from __future__ import annotations

import json
import re

from tonnage.report import LanesPage, PageTable, render_lanes

EVIL = "</script><img src=x onerror=alert(1)>&"


def page() -> LanesPage:
    return LanesPage(
        title=EVIL,
        verdict=EVIL,
        reasons=(EVIL,),
        tables=(PageTable(caption=EVIL, heads=(EVIL, "b"), rows=((EVIL, "2"),)),),
        lanes=("rank 0 stream 7", EVIL),
        pieces=((0, 0.0, 5.0, "compute", "gemm", 1), (1, 5.0, 9.0, "waiting", EVIL, 3)),
        steps=(("4", 0.0, 9.0),),
    )


def test_what_a_trace_says_is_text_and_nothing_else() -> None:
    html = render_lanes(page())
    # What is ours to write: all but the drawing library and its script.
    own = re.sub(r"<script>.*?</script>", "", html, flags=re.S)
    assert "<img" not in own
    assert own.count("</script>") == 1
    assert "default-src 'none'" in own
    assert "http" not in own.replace("http-equiv", "")


def test_the_columns_of_the_picture_are_embedded() -> None:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', render_lanes(page()), re.S)
    assert found
    data = json.loads(found[1])
    assert data["lane"] == [0, 1]
    assert data["stop"] == [5.0, 9.0]
    assert [data["kinds"][kind] for kind in data["kind"]] == ["compute", "waiting"]
    assert data["merged"] == [1, 3]


def test_only_kinds_that_are_there_stand_in_the_key() -> None:
    html = render_lanes(page())
    assert '<i class="waiting">' in html
    assert '<i class="moving">' not in html
