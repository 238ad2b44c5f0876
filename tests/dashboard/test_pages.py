"""The pages of a recorded run: what they say, that nothing hostile gets into them, and that they follow a live run."""

import sqlite3
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from recorded_run import CALLS, HOSTILE, call, make_run
from starlette.testclient import TestClient
from synthetic_journal import journal

from gyre import dashboard
from gyre.core.errors import ConfigError
from gyre.core.events import ExecutionStarted, GroupReady, StepDone
from gyre.core.records import Outcome, RoleClass, Validity
from gyre.dashboard import pages
from gyre.dashboard.app import make_app
from gyre.dashboard.view import RunView
from gyre.report.text import visible
from gyre.report.tree_lines import tree_lines
from gyre.store import RunDir

PAGES = (
    "/",
    "/executions",
    "/executions?step=1",
    "/executions?outcome=no-work",
    "/executions/0-0",
    "/executions/9-0",
    "/executions/0-0/calls/1",
    "/executions/0-0/calls/4",
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run")


@pytest.fixture
def client(run: RunDir) -> TestClient:
    return client_of(run)


def client_of(run: RunDir) -> TestClient:
    return TestClient(make_app(RunView(run)), base_url="http://127.0.0.1:8790")


class Parsed(HTMLParser):
    """What a browser makes of a page: elements with their attributes, and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def links(self) -> list[str]:
        return [attributes["href"] or "" for tag, attributes in self.elements if tag == "a"]


def page(client: TestClient, path: str) -> Parsed:
    response = client.get(path)
    assert response.status_code == 200, response.text
    return Parsed(response.text)


def test_the_overview_says_what_inspect_says(client: TestClient) -> None:
    parsed = page(client, "/")
    for shown in ("34 started: 32 valid, 1 no-work", "broken", "Steps", "Role transitions", "Processes lost"):
        assert shown in parsed.text
    assert "One step trains B = 2 groups of N = 4 executions: 8 executions." in parsed.text
    assert "/executions?step=4" in parsed.links()
    charts = [attributes["src"] for tag, attributes in parsed.elements if tag == "img"]
    assert [src.split("?")[0] for src in charts if src] == [
        "/charts/reward.svg",
        "/charts/staleness.svg",
        "/charts/timeline.svg",
    ]
    for src in charts:
        response = client.get(str(src))
        assert ET.fromstring(response.text).tag.endswith("svg")
        assert "sandbox" in response.headers["content-security-policy"]


def test_executions_are_filtered_and_paged(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    of_step = page(client, "/executions?step=1").links()
    assert sum(link.startswith("/executions/") for link in of_step) == 8
    assert "/executions/0-0" in of_step
    assert "/executions/2-0" not in of_step
    running = page(client, "/executions?outcome=running")
    assert [link for link in running.links() if link.startswith("/executions/")] == ["/executions/9-1"]
    monkeypatch.setattr(pages, "EXECUTIONS", 7)
    seen = []
    path = "/executions?outcome=valid"
    while path:
        parsed = page(client, path)
        seen += [link for link in parsed.links() if link.startswith("/executions/")]
        path = next(("/executions" + link for link in parsed.links() if f"page={len(seen) // 7 + 1}" in link), "")
    assert len(seen) == len(set(seen)) == 32


def test_an_execution_is_shown_call_by_call(client: TestClient) -> None:
    text = page(client, "/executions/0-0").text
    assert "main calls 0 … 3 (3, 6 tokens out), root" in text
    assert "└── main call 2 (1, 2 tokens out), leaves call 0 after 3 tokens" in text
    assert "gamma delta" in text
    assert "reward 0.750" in text
    assert "└── main call 5 (1, 2 tokens out), continues call 3, never a target" in text
    one = page(client, "/executions/0-0/calls/3")
    assert "The prompt begins with 8 tokens of call 1." in " ".join(one.text.split())
    assert "/executions/0-0/calls/1" in one.links()


def test_a_long_call_is_paged_by_tokens(run: RunDir) -> None:
    with run.open_store() as store:
        store.put_record(call(0, None, new=(1,) * 4500, execution_id="1-0"))
    client = client_of(run)
    assert page(client, "/executions/1-0").text.count("beta") < 300
    counts = [page(client, f"/executions/1-0/calls/0?page={n}").text.count("beta") for n in (1, 2, 3)]
    assert counts == [2000, 2000, 500]


def test_without_a_tokenizer_ids_are_shown(run: RunDir) -> None:
    run.config.write_text("")
    client = client_of(run)
    text = page(client, "/executions/0-0").text
    assert "tokens are shown as ids" in text
    assert "2 3" in text
    assert "cannot be explained" in page(client, "/").text


@pytest.mark.parametrize("path", PAGES)
def test_hostile_text_is_only_text(client: TestClient, path: str) -> None:
    response = client.get(path)
    parsed = Parsed(response.text)
    templates = (Path(dashboard.__file__).parent / "templates").glob("*.html")
    ours = {tag for template in templates for tag, _ in Parsed(template.read_text()).elements}
    assert {tag for tag, _ in parsed.elements} <= ours | {"td", "th", "tr"}
    assert "script" not in ours
    for _, attributes in parsed.elements:
        assert not any(name.startswith("on") or name == "style" for name in attributes)
        for name in ("href", "src", "action"):
            assert (attributes.get(name) or "/").startswith(("/", "?"))
    assert "\x1b" not in response.text
    assert "\u202e" not in response.text
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'self'; img-src 'self'")
    assert "script" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/", "/executions", "/executions/0-0", "/executions/0-0/calls/1"])
def test_hostile_text_can_be_read(client: TestClient, path: str) -> None:
    assert visible(HOSTILE) in page(client, path).text


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"/executions/{'<script>'}", 404),
        ("/executions/0-0/calls/77", 404),
        ("/executions?step=<script>", 400),
        ("/executions?outcome=<script>", 400),
        ("/executions?page=2", 404),
        ("/executions?page=0", 404),
        ("/executions?step=" + "9" * 5000, 400),
        ("/charts/<script>.svg", 404),
        ("/<script>", 404),
    ],
)
def test_what_is_not_there_is_one_sentence(client: TestClient, path: str, status: int) -> None:
    response = client.get(path)
    assert response.status_code == status
    assert "script" not in {tag for tag, _ in Parsed(response.text).elements}
    assert "content-security-policy" in response.headers


def test_only_get_and_only_loopback_names(run: RunDir, client: TestClient) -> None:
    assert client.post("/").status_code == 405
    assert client.get("/", headers={"host": "rebound.example:8790"}).status_code == 400
    anywhere = TestClient(make_app(RunView(run), any_host=True), base_url="http://rebound.example")
    assert anywhere.get("/").status_code == 200


def test_a_live_run_grows_on_the_pages(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", "")
    client = client_of(run)
    reloading = '<meta http-equiv="refresh"'
    assert reloading in client.get("/").text
    events = journal(4)
    first = next(index for index, event in enumerate(events) if isinstance(event, StepDone)) + 1
    with run.open_store() as store:
        for event in events[:first]:
            store.append(event)
        before = page(client, "/")
        assert "/executions?step=1" in before.links()
        assert "/executions?step=2" not in before.links()
        charts = client.get("/charts/reward.svg").content
        files = sorted(path.name for path in run.root.iterdir())
        for event in events[first:]:
            store.append(event)
        after = client.get("/").text
        assert "/executions?step=4" in Parsed(after).links()
        assert "completed" in after
        assert reloading not in after
        assert client.get("/charts/reward.svg").content != charts
        for record in CALLS[:2]:
            store.put_record(record)
        assert "1 main (4)" in page(client, "/executions?step=1").text
        store.put_record(CALLS[4])
        assert "1 sub-agent (2)" in page(client, "/executions?step=1").text
        assert sorted(path.name for path in run.root.iterdir()) == files, "reading leaves nothing"


def test_an_outcome_without_a_journal_entry_is_shown(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", "")
    with run.open_store() as store:
        store.put_outcome(Outcome(execution_id="x", validity=Validity.VALID, reward=0.5, cause="completed"))
        store.append(ExecutionStarted(t=0.0, execution_id="y", group=0, query="q", harness="h"))
    client = client_of(run)
    assert "reward 0.500" in page(client, "/executions/x").text
    assert "No outcome yet" in page(client, "/executions/y").text


def test_an_empty_run_has_pages(tmp_path: Path) -> None:
    client = client_of(RunDir.create(tmp_path / "run", ""))
    parsed = page(client, "/")
    assert "not finished" in parsed.text
    assert "img" not in {tag for tag, _ in parsed.elements}
    assert client.get("/charts/timeline.svg").status_code == 404
    assert "0 executions" in page(client, "/executions").text


def test_a_run_of_another_schema_is_refused(run: RunDir) -> None:
    connection = sqlite3.connect(run.database)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ConfigError, match="has schema 99 and this Gyre reads schema 1"):
        RunView(run)


def test_an_event_of_a_newer_gyre_is_one_sentence(run: RunDir, client: TestClient) -> None:
    with sqlite3.connect(run.database) as connection:
        connection.execute("""INSERT INTO events (t, kind, payload) VALUES (1, 'new', '{"kind":"new","t":1}')""")
    connection.close()
    response = client.get("/")
    assert response.status_code == 500
    assert "holds a row that this Gyre cannot read" in Parsed(response.text).text
    with run.open_store() as store:
        store.append(GroupReady(t=1.0, group=1))
    assert client.get("/executions").status_code == 500, "it is not forgotten"


def test_lines_of_a_tree_hold_every_call_once() -> None:
    lines = tree_lines(CALLS)
    assert [[record.seq for record in line.calls] for line in lines] == [[0, 1, 3], [2], [5], [4]]
    assert [(line.depth, line.parent_seq, line.leaves_at) for line in lines] == [
        (0, None, None),
        (1, 0, 3),
        (1, 3, None),
        (0, None, None),
    ]
    chain = [call(0, None), *(call(n, n - 1, shared=4 * n) for n in range(1, 3000))]
    assert [len(line.calls) for line in tree_lines(chain)] == [3000]
    other_role = [call(0, None), call(1, 0, RoleClass.MAIN_SUMMARY, shared=4), call(2, 0, shared=4)]
    assert [[record.seq for record in line.calls] for line in tree_lines(other_role)] == [[0, 2], [1]]
    orphan = msgspec.structs.replace(call(1, 0, shared=4), trainable=False)
    assert [[record.seq for record in line.calls] for line in tree_lines([call(0, None), orphan])] == [[0], [1]]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("length", [2, 3, 12, 40, 60])
def test_charts_can_be_drawn_from_the_first_events_on(tmp_path: Path, length: int) -> None:
    run = RunDir.create(tmp_path / "run", "")
    with run.open_store() as store:
        for event in journal(4)[:length]:
            store.append(event)
    view = RunView(run)
    for name in view.charts():
        assert view.chart(name)
    assert ("timeline" in view.charts()) == (length > 5)
