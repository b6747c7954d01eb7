"""The page of a run, in a real browser: what a person finds on it, and what it survives."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spmdrl import config
from spmdrl.report.page import write as page_writer
from spmdrl.report.page.layer_norms import layer_norms
from spmdrl.report.page.step_time import causes_of
from spmdrl.report.page.timelines import newest_steps
from spmdrl.report.page.write import PageLimits, RunPage, spread
from spmdrl.report.recorded_groups import GroupReader
from spmdrl.tools.commands import view as viewer
from tests.helpers.browser import Browser, browser, needs_chromium
from tests.helpers.pages import part_of, parts_of
from tests.helpers.report_world import config as report_config
from tests.helpers.report_world import record_steps, reporting
from tests.rollout.test_record import config_of, group_of, record, record_groups, record_trained
from tests.rollout.test_tree import compacted

VENDOR = Path(page_writer.__file__).parent / "vendor"
STEPS = 60


@pytest.fixture(scope="module")
def chrome(tmp_path_factory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as started:
        yield started


def metrics_rows(*, rewards_fall_at: int = STEPS) -> list[dict[str, Any]]:
    """Return rows of metrics.jsonl of a run of two ranks, one of which trains."""
    rows: list[dict[str, Any]] = [{"step": 0, "unix_s": 1e9, "sync/probe_gap": 1e-6}]
    for step in range(STEPS):
        is_low = step >= rewards_fall_at
        rows.append(
            {
                "step": step,
                "unix_s": 1e9 + step,
                "perf/step_s": 1.0,
                "time/await_rollouts": 0.5,
                "time/await_rollouts_tail": 0.25,
                "time/update": 0.25,
                "time/push": 0.05,
                "reward/mean": 0.1 if is_low else 0.5 + 0.1 * math.sin(step),
                "policy/entropy": 0.9 if is_low else 0.2 + 0.01 * math.cos(step),
                "policy/grad_norm": 1.0,
                "mem/rss_gib": 1.5,
            }
        )
        if step % 20 == 0:
            rows.append({"step": step, "unix_s": 1e9 + step, "eval/reward": 0.3 + step / 100})
    return rows


def write_metrics(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run(tmp_path) -> Path:
    """The folder of a run with metrics, an evaluation and two recorded steps."""
    folder = tmp_path / "mine"
    write_metrics(folder, metrics_rows(rewards_fall_at=40))
    cfg = config_of(folder, steps=STEPS, algorithm=dict(advantage="rloo"))
    for step in (20, 40):
        record_trained(cfg, step, record(cfg, step, range(4)))
    (folder / "config.yaml").write_text(config.dump(cfg))
    (folder / "evaluations").mkdir()
    for step, right in ((0, 0.0), (20, 1.0)):
        estimate = {"mean": right, "half_width": 0.1, "num_problems": 2}
        problems = [
            {"index": index, "source": "s", "rewards": [right * index], "answers": ["7"],
             "lengths": [3], "num_truncated": 0, "parts": {}}
            for index in range(2)
        ]  # fmt: skip
        content = {"step": step, "samples": 1, "temperature": 1.0, "data": "task:addition",
                   "all": {"reward": estimate}, "sources": {"s": {"reward": estimate}},
                   "problems": problems}  # fmt: skip
        (folder / "evaluations" / f"evaluation_{step}.json").write_text(json.dumps(content))
    return folder


def shown(chrome: Browser, *folders: Path, place: str = "", **options: Any) -> Path:
    """Write a page and open it; no error is in its console, and only the file was loaded."""
    out = folders[0].parent / "page.html"
    RunPage(folders, **options).write(out)
    chrome.open(out, place)
    assert_quiet(chrome, out)
    return out


def assert_quiet(chrome: Browser, out: Path) -> None:
    chrome.settle()
    assert chrome.errors == []
    own = {url.partition("#")[0] for url in chrome.requests}
    assert own <= {out.resolve().as_uri(), "about:blank"}


# --------------------------------------------------------------------------- what a person finds


@needs_chromium
def test_curves_of_several_runs_are_searched_and_lie_over_each_other(chrome, run):
    other = run.with_name("other")
    write_metrics(other, metrics_rows())
    (other / "config.yaml").write_text(config.dump(config_of(other, seed=5)))
    out = shown(chrome, run, other, place="tab=curves")
    panels = "[...document.querySelectorAll('[data-metric]')].map((p) => p.dataset.metric)"
    assert "reward/mean" in chrome.run(panels) and "mem/rss_gib" not in chrome.run(panels)
    box = "document.querySelector('[data-keep=search]')"
    chrome.run(f"{box}.focus(); {box}.value = 'entropy'; {box}.dispatchEvent(new Event('input'))")
    chrome.wait(f"{panels}.join() === 'policy/entropy'")
    assert chrome.run(f"document.activeElement === {box}")
    assert chrome.run("plots[0].series.length") == 5  # x, and pale and strong of two runs
    chrome.click("[data-keep=run1]")
    assert chrome.run("plots[0].series.length") == 3
    assert "hidden=1" in chrome.run("location.hash")
    chrome.go("tab=settings&differs=1")
    assert "seed" in chrome.text() and "sampling.temperature" not in chrome.text()
    assert_quiet(chrome, out)


@needs_chromium
def test_a_step_shows_where_its_time_goes_and_what_changed(chrome, run):
    shown(chrome, run, place="tab=step&step=40")
    text = chrome.text()
    assert re.search(r"tail\s+the last, long responses\s+0.25\s+25%", text)
    assert "What changed at step 40?" in text
    changed = text.split("What changed at step 40?")[1]
    assert changed.index("reward/mean") < 300 and "policy/entropy" in changed[:400]
    assert "mem/rss_gib" not in changed.split("policy/entropy")[0]


@needs_chromium
def test_the_overview_links_to_the_largest_change_that_lasts(chrome, run):
    rows = metrics_rows(rewards_fall_at=25)
    for row in rows:
        if "perf/step_s" in row and row["step"] in (20, 40):
            row["perf/step_s"] = 9.0
    write_metrics(run, rows)
    out = shown(chrome, run)
    assert re.search(r"reward/mean fell from 0\.\d+ to 0\.1 at step 25", chrome.text(".findings"))
    assert "perf/step_s" not in chrome.text(".findings")  # single long steps: evaluations
    chrome.click(".findings button")
    assert "What changed at step 25?" in chrome.text()
    assert_quiet(chrome, out)


@needs_chromium
def test_gradient_norms_by_layer_are_a_map_over_steps(chrome, run):
    rows = metrics_rows()
    for row in rows:
        if "reward/mean" not in row:
            continue
        at = row["step"]
        norms = {"00": 0.1, "01": 0.1 * 1.1**at, "head": 2.0 if at else 0.0}
        row |= {f"policy/grad_norm_layer/{layer}": norm for layer, norm in norms.items()}
    write_metrics(run, rows)
    out = shown(chrome, run, place="tab=curves&preset=gradients")
    chrome.wait("document.querySelector('[data-layers=policy] canvas')")
    assert "layer 01 (" in chrome.text(".say")
    assert chrome.run("[...document.querySelectorAll('[data-metric]')].length") == 1
    canvas = "document.querySelector('canvas[role=img]')"
    colors = f"""[[100, 4], [100, 20], [100, 36], [71, 36]].map(([x, y]) =>
        {canvas}.getContext('2d').getImageData(x, y, 1, 1).data.join())"""
    low, grown, high, nothing = chrome.run(colors)
    assert low.startswith("68,1,84") and len({low, grown, high}) == 3 and nothing == "0,0,0,0"
    chrome.run(f"{canvas}.dispatchEvent(new MouseEvent('mousemove', {{clientX: "
               f"{canvas}.getBoundingClientRect().x + 71, clientY: "
               f"{canvas}.getBoundingClientRect().y + 4}})); 1")  # fmt: skip
    assert "layer 00, step 0: 0.1" in chrome.text("[data-layers=policy] .value")
    chrome.run(f"{canvas}.dispatchEvent(new MouseEvent('click', {{clientX: "
               f"{canvas}.getBoundingClientRect().right - 2, clientY: "
               f"{canvas}.getBoundingClientRect().y + 4}})); 1")  # fmt: skip
    assert "step=59" in chrome.run("location.hash")
    assert_quiet(chrome, out)


def write_timeline(folder: Path, step: int) -> None:
    """Rank 1 samples for 0.6 s longer than rank 0 updates, which waits for it."""
    (folder / "timeline").mkdir(exist_ok=True)
    head = {"step": step, "attempt": 1, "host": "<b>node</b>", "began_unix_s": 1e9}
    push = ["push", 1.0, 0.25, "all"]
    trainer = [["update", 0.0, 0.4, "trainers"], ["await_peers", 0.4, 0.6, "all"], push]
    engine = [["generate", 0.0, 1.0, "replica"], ["await_peers", 1.0, 0.0, "all"], push]
    own = [{"replica": -1, "spans": trainer}, {"replica": 0, "spans": engine}]
    for rank, row in enumerate(own):
        path = folder / "timeline" / f"rank_{rank}.jsonl"
        with path.open("a") as file:
            file.write(json.dumps(head | row) + "\n")


@needs_chromium
def test_the_timeline_of_a_step_says_who_waited_for_whom(chrome, run):
    write_timeline(run, 40)
    out = shown(chrome, run, place="tab=step&step=40")
    chrome.wait("document.querySelector('#timeline svg')")
    text = chrome.text("#timeline")
    assert "generate on rank 1 80%" in text
    assert "rank 0 waited 0.6 s in await_peers for rank 1, which was in generate" in text
    striped = "document.querySelectorAll('#timeline rect[fill=\"url(#waits)\"]').length"
    assert chrome.run(striped) == 1
    assert "mean of steps 40 to 40: " in chrome.text("#main")
    assert "sampling" in chrome.text(".say")
    chrome.go("tab=step&step=41")
    assert "not on the page" in chrome.text("#timeline")
    assert_quiet(chrome, out)


@needs_chromium
def test_the_time_outside_of_all_phases_is_on_the_timeline(chrome, run):
    write_timeline(run, 40)
    path = run / "timeline" / "rank_1.jsonl"
    path.write_text(path.read_text().replace('["generate", 0.0, 1.0', '["generate", 0.9, 0.1'))
    out = shown(chrome, run, place="tab=step&step=40")
    chrome.wait("document.querySelector('#timeline svg')")
    text = chrome.text("#timeline")
    assert "outside of all phases on rank 1 72%" in text
    table = re.sub(r"\s+", " ", chrome.text("#main").split("along its critical path")[-1])
    assert "mean of steps 40 to 40, s" in table and re.search(r"other .{0,70} 0.9 72%", table)
    assert "72% of it (0.9 s) is work outside of all phases" in chrome.text(".say")
    assert "for rank 1, which was outside of all phases" in text
    assert chrome.run("document.querySelectorAll('#timeline rect.outside').length") == 1
    told = chrome.run("document.querySelector('#timeline rect.outside title').textContent")
    assert told.startswith("rank 1: 0.9 s") and "your own code in train.py" in told
    assert_quiet(chrome, out)


@needs_chromium
def test_rollouts_show_tokens_with_their_numbers_by_mouse_and_keyboard(chrome, run, monkeypatch):
    decode = (lambda ids: "".join(f"<{token}>" for token in ids), None)
    monkeypatch.setattr(GroupReader, "_decoder", decode)
    out = shown(chrome, run, place="tab=rollouts&step=40&row=101")
    chrome.wait("document.querySelector('details')?.open")
    assert "what is <0>?" in chrome.text() and "1 of 4 groups" in chrome.text()
    sample = "[data-sample='1'] pre"
    assert chrome.text(sample) == "<1><2><9><3>"
    colors = f'[...document.querySelectorAll("{sample} span")].map((s) => s.style.background)'
    pushed = [float(color.split(",")[-1][:-1]) for color in chrome.run(colors) if color]
    assert pushed[1] > pushed[0] > pushed[2] > 0.2  # logprobs -2, -0.5, -1/3
    chrome.run(f'document.querySelector("{sample}").focus()')
    for _ in range(2):
        chrome.key("ArrowRight")
    told = chrome.text("#token")
    assert "id 2" in told and "logprob -2 nats" in told and "probability 14%" in told
    assert "version 1" in told and "advantage 2.2" in told
    assert "trainer / engine 0.882" in told  # exp(-GAP)
    chrome.key("ArrowRight")
    assert "read, not sampled" in chrome.text("#token")
    chrome.run("{const s = document.querySelector('[data-keep=color]'); s.value = 'advantage';"
               "s.dispatchEvent(new Event('change')); 1}")  # fmt: skip
    chrome.wait("document.querySelector('details')?.open")
    strong, again, read, last = chrome.run(colors)
    assert strong == again == last != "" and read == ""
    chrome.go("tab=rollouts&step=40&row=101&color=ratio")
    chrome.wait("document.querySelector('details')?.open")
    ratios = chrome.run(colors)
    assert ratios[2] == "" and ratios[0] not in ("", strong)  # the trainer's are lower
    chrome.go("tab=rollouts&step=40&least=3")
    chrome.wait("document.querySelectorAll('details').length === 2")
    chrome.go("tab=rollouts&step=33")
    assert "the nearest one" in chrome.text()
    assert_quiet(chrome, out)


@needs_chromium
def test_a_step_without_rollouts_stays_chosen_and_leads_to_the_nearest(chrome, run):
    out = shown(chrome, run, place="tab=rollouts&step=40")
    box = "document.querySelector('[data-keep=step]')"
    chrome.run(f"{box}.value = 33; {box}.dispatchEvent(new Event('change')); 1")
    assert "step=33" in chrome.run("location.hash")
    assert "The rollouts of step 33 are not on the page; these are of step 40" in chrome.text()
    chrome.click("#tab-step")
    assert "Timeline of step 33" in chrome.text()
    assert "The nearest step that has them: rollouts of step 40" in chrome.text("#to-rollouts")
    chrome.click("#to-rollouts button")
    assert "tab=rollouts&step=40" in chrome.run("location.hash")
    assert_quiet(chrome, out)


@needs_chromium
def test_the_bars_of_steps_say_their_numbers(chrome, run):
    shown(chrome, run, place="tab=step&step=40")
    chrome.wait("plots.length")
    chrome.run("plots[0].setCursor({left: plots[0].valToPos(7, 'x'), top: 10}); 1")
    chrome.settle()
    found = chrome.text(".chart .value")
    assert found.startswith("step 7: 1 s; ") and "tail 0.25" in found


@needs_chromium
def test_all_steps_are_searched_for_a_text(chrome, run):
    out = shown(chrome, run, place="tab=rollouts&text=%3Cb%3E")
    buttons = "[...document.querySelectorAll('button')]"
    chrome.run(f"{buttons}.find((b) => /search all/.test(b.innerText)).click()")
    chrome.wait("/2 of 2 steps searched, 8 responses/.test(document.body.innerText)")
    assert chrome.text("tbody td:nth-child(6)") == "what is <0>?"
    chrome.click("tbody button")
    chrome.wait("document.querySelector('details mark')")
    assert "step=20" in chrome.run("location.hash")
    assert_quiet(chrome, out)


@needs_chromium
def test_an_agents_episode_is_drawn_as_a_tree(chrome, run):
    group = group_of(0)
    traces = compacted().traces()
    group.samples[1].__dict__["traces"] = traces
    record_groups(config_of(run), 50, [group, *map(group_of, range(1, 4))])
    shown(chrome, run, place="tab=rollouts&step=50&row=101")
    chrome.wait("document.querySelector('svg.tree')")
    assert chrome.run("document.querySelectorAll('svg.tree path').length") == 1
    assert chrome.run("document.querySelectorAll('.episode').length") == 3
    assert "after token 4 of trace 1" in chrome.text()


@needs_chromium
def test_evaluations_are_shown_over_steps_and_by_problem(chrome, run):
    shown(chrome, run, place="tab=evaluations&order2=gain")
    chrome.wait("document.querySelectorAll('table').length === 2")
    text = re.sub(r"\s+", " ", chrome.text())
    assert "20 2 1 1 ±0.1" in text and "2 s 0 1 7 1 s 0 0 7" in text
    assert "3 evaluations are too few" in text
    rows = metrics_rows()
    for step in range(0, 200, 20):
        reward = 0.2 + 0.6 / (1 + (60 / max(step, 1)) ** 2)
        rows.append({"step": step, "unix_s": 1e9 + step, "eval/reward": reward})
    write_metrics(run, rows)
    out = shown(chrome, run, place="tab=evaluations")
    chrome.wait("plots.length === 1")
    assert "Going on from 180 to 360 steps" in chrome.text()
    assert_quiet(chrome, out)


# --------------------------------------------------------------------------- what it survives

HOSTILE = (
    "</script><script>document.title='run'</script>",
    "<img src=x onerror=\"document.title='run'\">",
    "<!-- ", "]]>", "{{ 7 * 7 }}", "\u202ereversed\u2066", "\x00\x1b[2J", "\u2028\u2029",
)  # fmt: skip


@needs_chromium
def test_hostile_texts_stay_texts(chrome, run, monkeypatch):
    evil = "".join(HOSTILE)
    monkeypatch.setattr(GroupReader, "_decoder", (lambda ids: evil + "\ud800", None))
    group = group_of(0)
    for episode in group.samples.values():
        episode.__dict__["text"] = evil + 10_000_000 * "x"
        episode.prompt.__dict__["text"] = evil
    cfg = config_of(run, rewards=dict(functions=("r.py:right", "r.py:brief")))
    record_groups(cfg, 20, [group])
    rows = [row | {f"my/{evil}": 1.0, "my/__proto__": 2.0} for row in metrics_rows()]
    write_metrics(run, rows)
    evil_run = run.with_name(evil.replace("/", "|")[:60])
    run.rename(evil_run)
    out = shown(chrome, evil_run, place="tab=rollouts&step=20")
    assert out.stat().st_size < 2_000_000
    chrome.wait("document.querySelector('[data-sample=\"1\"] pre')")
    text = chrome.text("#groups")
    assert "<img src=x onerror=" in text and "⟨U+202E⟩reversed" in text and "⟨U+0000⟩" in text
    assert "⟨U+D800⟩" in text and "{{ 7 * 7 }}" in text
    for tab in ("overview", "curves&preset=all", "step", "settings", "evaluations", "memory"):
        chrome.go(f"tab={tab}")
        assert "unpack" not in chrome.text()
    assert chrome.run("document.title") != "run"
    assert chrome.run("document.querySelectorAll('img').length") == 0
    assert_quiet(chrome, out)
    # A script that is added later does not run either.
    chrome.run("{const s = document.createElement('script'); s.textContent = 'document.title=1';"
               "document.body.append(s); 1}")  # fmt: skip
    assert chrome.run("document.title") != "1"


@needs_chromium
def test_empty_and_broken_runs_say_so(chrome, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.yaml").write_text("steps: many")
    broken = tmp_path / "broken"
    rows = metrics_rows()
    write_metrics(broken, rows)
    lines = (broken / "metrics.jsonl").read_text().splitlines()
    lines[3] = '{"step": 2, "reward/me'
    lines[5] = '{"step": 4, "reward/mean": "high"}'
    (broken / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 70, "rew')
    (broken / "evaluations").mkdir()
    (broken / "evaluations" / "evaluation_3.json").write_text("{}")
    (broken / "rollouts").mkdir()
    (broken / "rollouts" / "step_000003_replica_0_of_1.parquet").write_text("PAR1")
    out = shown(chrome, empty, broken)
    text = chrome.text()
    assert "No step was recorded yet" in text and "there is no metrics.jsonl" in text
    assert "the config cannot be shown" in text
    assert "line 4 holds no row of a step" in text and "line 65 breaks off" in text
    assert "line 6: reward/mean is no number" in text
    assert "evaluations/evaluation_3.json" in text and "rollouts of step 3 are not shown" in text
    for tab in ("curves", "step", "rollouts", "evaluations", "memory", "settings"):
        for number in (0, 1):
            chrome.go(f"tab={tab}&run={number}")
            assert_quiet(chrome, out)


@needs_chromium
def test_a_followed_page_loads_itself_again_and_keeps_its_place(chrome, run):
    page = RunPage([run])
    out = run / "page.html"
    page.write(out, reload_s=1.0)
    assert page.is_done
    chrome.open(out, "tab=rollouts&step=20")
    chrome.wait("document.querySelectorAll('details').length === 4")
    for number in range(1, 4):
        chrome.click(f"[data-group='{number}'] summary")
    chrome.run("scrollTo(0, 120); window.isOld = true")
    assert chrome.run("scrollY") == 120
    page.write(out, reload_s=0.0)
    chrome.wait("!window.isOld && document.querySelector('[data-group=\"2\"]')?.open")
    chrome.wait("Math.abs(scrollY - 120) < 3")
    assert "step=20" in chrome.run("location.hash")
    assert chrome.errors == []


def test_follow_ends_when_all_steps_are_done_and_reads_only_what_is_new(run, monkeypatch, capsys):
    write_metrics(run, metrics_rows()[:30])
    waits: list[float] = []
    read: list[int] = []
    reads = GroupReader.read

    def wait(seconds: float) -> None:
        waits.append(seconds)
        assert part_of(run / "page.html", "main")["reload_s"] == viewer._FOLLOW_S
        if len(waits) == 1:
            record(config_of(run), 41, range(4))
        write_metrics(run, metrics_rows()[: 30 * len(waits) + 30])

    def counted(self: GroupReader, step: int, group: int | None) -> Any:
        read.append(step)
        return reads(self, step, group)

    monkeypatch.setattr(viewer.time, "sleep", wait)
    monkeypatch.setattr(GroupReader, "read", counted)
    assert viewer.main([str(run), "--follow"]) == 0
    assert len(waits) == 2 and sorted(read) == [20, 40, 41]
    assert part_of(run / "page.html", "main")["reload_s"] == 0
    assert f"wrote {run / 'page.html'}" in capsys.readouterr().out


# --------------------------------------------------------------------------- without a browser


def test_a_run_writes_its_page_at_its_end_and_goes_on_if_it_cannot(tmp_path, capsys):
    with reporting(report_config(tmp_path / "a", steps=3)) as report:
        record_steps(report, 0, 3)
    report.write_page()
    assert f"page: {tmp_path / 'a' / 'page.html'}" in capsys.readouterr().out
    main = part_of(tmp_path / "a" / "page.html", "main")
    assert main["runs"][0]["tables"]["training"]["steps"] == [0, 1, 2]
    (tmp_path / "a" / "page.html").unlink()
    (tmp_path / "a" / "page.html").mkdir()
    report.write_page()
    assert "page.html cannot be written: " in capsys.readouterr().out


def test_what_does_not_fit_is_left_out_and_said(run, capsys):
    RunPage([run]).write(run / "page.html")
    parts = re.findall(r'id="part-rollouts-0-\d+">([^<]*)<', (run / "page.html").read_text())
    most = 1.5 * len(parts[0]) / 2**20
    assert viewer.main([str(run), "--limit-mib", f"{most:.6f}"]) == 0
    assert "left out of the page (1 of rollouts)" in capsys.readouterr().out
    assert [key for key in parts_of(run / "page.html") if "rollouts" in key] == ["rollouts-0-40"]
    page = RunPage([run], limits=PageLimits(seconds=-1.0))
    for step in (40, 41):
        write_timeline(run, step)
    size = sum(path.stat().st_size for path in (run / "timeline").iterdir())
    assert newest_steps(run, most_bytes=size)[1]
    steps, is_whole = newest_steps(run, most_bytes=size - 100)
    assert [*steps] == [41] and not is_whole
    assert "(2 of rollouts, 2 of timeline)" in page.write(run / "page.html")
    assert spread(range(9)) == [8, 0, 4, 2, 6, 1, 3, 5, 7]
    assert sorted(spread(range(100))) == [*range(100)]
    assert viewer.main([str(run), "--limit-mib", "0"]) == 2
    assert viewer.main([str(run / "evaluations")]) == 2
    assert viewer.main([str(run), str(run), "--step", "20"]) == 2


def test_the_time_of_a_step_adds_up():
    row = metrics_rows()[1]
    causes = causes_of(row)
    assert causes["generate"] == causes["tail"] == causes["update"] == 0.25
    assert sum(causes.values()) == pytest.approx(1.0)
    colocated = {"perf/step_s": 2.0, "time/generate": 1.5, "time/engine_idle_tail": 1.0}
    assert causes_of(colocated)["generate"] == 0.5


def test_the_layers_of_a_model_are_in_its_order_and_those_that_grew_most_are_named():
    norms: dict[str, list[float | None]] = {
        "10": [1.0, 2.0, 6.0],
        "head": [4.0, None, 2.0],
        "02": [0.0, 1.0, 5.0],
        "embedding": [None, None, 3.0],
    }
    columns = {f"policy/grad_norm_layer/{layer}": own for layer, own in norms.items()}
    columns |= {"value/grad_norm_layer/00": [2.0, 2.0, 1.0], "policy/grad_norm": [1.0] * 3}
    found = layer_norms({"steps": [0, 10, 20], "columns": columns})
    layers = [layer for layer, _ in found["policy"]["layers"]]
    assert layers == ["embedding", "02", "10", "head"]
    assert found["policy"]["layers"][1] == ("02", "policy/grad_norm_layer/02")
    assert found["policy"]["text"].endswith(": layer 10 (6 times), layer 02 (5 times).")
    assert found["value"]["text"].startswith("No layer's gradient norm grew from the first tenth")
    assert layer_norms({"steps": [0], "columns": {}}) == {}
    (once,) = layer_norms({"steps": [0], "columns": {"prm/grad_norm_layer/00": [1.0]}}).values()
    assert once["text"] == ""


def test_the_vendored_library_is_the_published_one():
    said = (VENDOR / "README.md").read_text()
    digests = dict(re.findall(r"`([\w.]+)` \| `([0-9a-f]{64})`", said))
    files = {path.name for path in VENDOR.iterdir()} - {"README.md"}
    assert digests.keys() == files
    for name, digest in digests.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest
