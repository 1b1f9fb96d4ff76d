"""The admin port: what operators change there is answered truthfully."""

import asyncio

from disagg.messages.session import PrefixCacheReset
from disagg.messages.stats import RESIDENCY_BOUNDS_MS, ResidencyHistogram
from disagg.router import metrics as metrics_module
from disagg.router.metrics import Metrics
from disagg.testing.scripted_worker import READY
from disagg.tls.certificate_files import CertificateFiles
from tests.unit.tls.strangers import create

PATH = "/reset_prefix_cache"


async def test_clients_do_not_find_it(house):
    assert (await house.http.post(PATH)).status_code == 404
    assert house.workers[0].resets == []
    assert (await house.admin.get(PATH)).status_code == 405


async def test_every_worker_forgets_and_the_answer_says_what(open_house):
    house = await open_house()
    workers = [await house.add(f"w{i}") for i in (1, 2)]
    workers[1].reset_answer = PrefixCacheReset(0, 5, (("lease", 2), ("sequence", 9)))
    response = await house.admin.post(PATH)
    assert response.status_code == 200
    body = response.json()
    assert (body["success"], body["num_forgotten"]) == (True, 8)
    told = {one["worker"]["worker_id"]: one for one in body["workers"]}
    assert told["w1"]["in_use"] == {}
    assert told["w2"]["in_use"] == {"lease": 2, "sequence": 9}
    assert [worker.resets for worker in workers] == [[1], [1]]
    assert "error" not in body
    metrics = (await house.admin.get("/metrics")).text
    assert 'disagg_routing_cache_resets_total{model_name="tiny",outcome="complete"} 1.0' in metrics


async def test_a_worker_that_refuses_or_is_lost_makes_it_a_503_that_names_it(open_house):
    house = await open_house()
    refuses, silent = [await house.add(f"w{i}") for i in (1, 2)]
    refuses.reset_answer = PrefixCacheReset(0, 0, refused="there is none")
    silent.reset_answer = None
    asked = asyncio.create_task(house.admin.post(PATH))
    await silent.until(lambda: silent.resets, "the reset")
    assert (await house.admin.post(PATH)).status_code == 429  # one at a time
    await silent.stop()
    response = await asked
    assert response.status_code == 503
    body = response.json()
    assert not body["success"]
    assert "w1 there is none; w2 was lost" in body["error"]["message"]
    assert [one["error"] is None for one in body["workers"]] == [False, False]


async def test_parameters_and_an_empty_fleet_are_refused(open_house):
    house = await open_house()
    response = await house.admin.post(PATH)
    assert response.status_code == 503
    assert "nothing was reset" in response.json()["error"]["message"]
    await house.add()
    response = await house.admin.post(f"{PATH}?reset_external=true")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "query"


async def test_a_router_that_stops_answers_who_waits(open_house):
    house = await open_house()
    worker = await house.add()
    worker.reset_answer = None
    asked = asyncio.create_task(house.admin.post(PATH))
    await worker.until(lambda: worker.resets, "the reset")
    await house.app.stop()
    assert (await asked).status_code == 503


async def turns_beside_a_page(house):
    """Turns that others have while a page of the metrics of 300 workers is made and sent."""
    counts = (1,) * (len(RESIDENCY_BOUNDS_MS) + 1)
    seen = tuple(ResidencyHistogram(name, counts, 7_000) for name in ("idle", "lifetime"))
    stats = type(READY)(*(0,) * 9, ready=True, residency=seen)
    for number in range(300):
        house.app.dispatcher.observers.metrics.worker_stats(f"w{number}", "both", stats)
    asked = asyncio.create_task(house.admin.get("/metrics"))
    turns = 0
    while not asked.done():
        await asyncio.sleep(0)
        turns += 1
    assert (await asked).text.count("disagg_cache_block_idle_seconds_count") == 300
    return turns


async def test_streams_go_on_while_metrics_of_many_workers_are_made(open_house, monkeypatch):
    house = await open_house()
    few_pieces = await turns_beside_a_page(house)
    monkeypatch.setattr(metrics_module, "LINES_MAX", 10)
    assert await turns_beside_a_page(house) > few_pieces + 1000, "a turn after each piece"


async def test_times_in_the_cache_are_histograms_until_the_worker_leaves(open_house):
    counts = [0] * (len(RESIDENCY_BOUNDS_MS) + 1)
    counts[0], counts[-1] = 2, 1
    house = await open_house()
    seen = ResidencyHistogram("idle", tuple(counts), 7_000)
    stats = type(READY)(*(0,) * 9, ready=True, residency=(seen,))
    worker = await house.add("w1", stats=stats)
    metrics = (await house.admin.get("/metrics")).text
    line = "disagg_cache_block_idle_seconds"
    labels = 'model_name="tiny",role="both",worker="w1"'
    assert f'{line}_bucket{{{labels},le="0.01"}} 2\n' in metrics
    assert f'{line}_bucket{{{labels},le="+Inf"}} 3\n' in metrics
    assert f"{line}_sum{{{labels}}} 7.0" in metrics
    shown = (await house.admin.get("/v1/disagg/workers")).json()["workers"][0]
    assert "residency" not in shown["stats"]
    await worker.stop()
    await house.until(lambda: not house.app.dispatcher.core.fleet, "the loss")
    assert line not in (await house.admin.get("/metrics")).text


def test_a_histogram_of_an_unknown_name_is_left_out():
    metrics = Metrics("tiny")
    stats = type(READY)(*(0,) * 9, ready=True, residency=(ResidencyHistogram("mood", (), 0),))
    metrics.worker_stats("w", "both", stats)
    assert "mood" not in metrics.text()


async def test_when_the_certificate_expires_is_on_the_page_of_metrics(open_house, tmp_path):
    name = "disagg_certificate_expiry_timestamp_seconds"
    folder = create(tmp_path)
    house = await open_house(tls_directory=str(folder))
    page = (await house.admin.get("/metrics")).text
    (line,) = (one for one in page.splitlines() if one.startswith(name))
    assert float(line.split()[-1]) == CertificateFiles(folder).current().not_after.timestamp()
    plain = await open_house()
    assert name not in (await plain.admin.get("/metrics")).text, "control"
