"""The precedence of sources; every error is one line with the key, its value and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.extras.harbor.launcher import HarborConfig
from trainer.config import TrainerConfig
from trainer.errors import ConfigError
from trainer.settings.elsewhere import ELSEWHERE
from trainer.settings.sources import SUCCESSORS, SUCCESSORS_BY_LAST_NAME, dump, keys_of, load

MINIMAL: dict[str, Any] = {
    "model": {"path": "model"},
    "remote_agent": {"command": {"argv": ["true"]}},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | {"rollout": {"group_size": 3, "concurrency": 7}}))
    return path


def error_of(path: Path, *overrides: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load([path], overrides, environment)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_file_overrides_the_default(file: Path) -> None:
    assert load([file]).rollout.group_size == 3


def test_environment_overrides_the_file(file: Path) -> None:
    config = load([file], [], {"AGENTIC_TRAIN__ROLLOUT__GROUP_SIZE": "4"})
    assert config.rollout.group_size == 4
    assert config.rollout.concurrency == 7


def test_command_line_overrides_the_environment(file: Path) -> None:
    environment = {"AGENTIC_TRAIN__ROLLOUT__GROUP_SIZE": "4"}
    assert load([file], ["rollout.group_size=5"], environment).rollout.group_size == 5


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.one_of(st.none(), st.integers(2, 99)), min_size=3, max_size=3),
)
def test_source_with_the_highest_precedence_sets_the_key(
    tmp_path_factory: pytest.TempPathFactory, values: list[int | None]
) -> None:
    in_file, in_environment, on_command_line = values
    path = tmp_path_factory.mktemp("config") / "c.yaml"
    rollout = {} if in_file is None else {"group_size": in_file}
    path.write_text(yaml.safe_dump(MINIMAL | {"rollout": rollout}))
    environment = (
        {}
        if in_environment is None
        else {"AGENTIC_TRAIN__ROLLOUT__GROUP_SIZE": str(in_environment)}
    )
    overrides = [] if on_command_line is None else [f"rollout.group_size={on_command_line}"]
    said = [v for v in (on_command_line, in_environment, in_file) if v is not None]
    assert load([path], overrides, environment).rollout.group_size == (said[0] if said else 8)


def test_settings_of_the_proxy_can_be_given_as_yaml(file: Path) -> None:
    words = ["proxy_server={template_kwargs: {enable_thinking: false}, start_timeout_s: 9}"]
    server = load([file], words).proxy_server
    assert server.template_kwargs == {"enable_thinking": False}
    assert server.start_timeout_s == 9


def test_verl_names_are_read_and_the_command_line_overrides_them(file: Path) -> None:
    environment = {"LLM_PROXY_IP": "10.0.0.7", "PROXY_SERVER_URL": "http://10.0.0.8:1"}
    words = ["proxy_server.url=http://10.0.0.9:2", "engine.urls=[http://10.0.0.9:3]"]
    config = load([file], words, environment)
    assert config.proxy_server.llm_proxy_ip == "10.0.0.7"
    assert config.proxy_server.url == "http://10.0.0.9:2"


def test_engine_url_whose_key_is_cut_is_refused_without_showing_the_key(file: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load([file], ["engine.urls=['http://:ab/cd+e=@host:8001']"])
    (problem,) = refused.value.problems
    assert problem.startswith("engine.urls: the URL that ends with '@host:8001' is not")
    assert "cd+e" not in problem


def test_running_proxy_without_engine_urls_is_refused(file: Path) -> None:
    text = error_of(file, "proxy_server.url=http://10.0.0.9:2")
    assert "proxy_server.url=http://10.0.0.9:2" in text
    assert "engine.urls" in text


def test_unrelated_environment_is_ignored(file: Path) -> None:
    assert load([file], [], {"HOME": "/", "AGENTIC_TRAINER": "x"}) == load([file])


def test_values_on_the_command_line_are_yaml(file: Path) -> None:
    config = load([file], ["optimizer.lr=1e-5", "data.train_files=[a.jsonl, b.jsonl]"])
    assert config.optimizer.lr == 1e-5
    assert [str(path) for path in config.data.train_files] == ["a.jsonl", "b.jsonl"]


def test_printed_configuration_is_read_back_equal(file: Path, tmp_path: Path) -> None:
    config = load([file], ["rollout.temperature=0.7", "data.weights={a: 2}"])
    again = tmp_path / "again.yaml"
    again.write_text(dump(config))
    assert load([again]) == config


def test_later_file_overrides_an_earlier_one(file: Path, tmp_path: Path) -> None:
    later = tmp_path / "later.yaml"
    later.write_text(yaml.safe_dump({"rollout": {"group_size": 5}}))
    config = load([file, later])
    assert (config.rollout.group_size, config.rollout.concurrency) == (5, 7)
    assert load([later, file]).rollout.group_size == 3


def test_all_wrong_keys_are_named_at_once(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load([file], ["rollout.group_sizes=4", "optimizer.lr=-1", "trainer.foo=x"])
    wrong = sorted(problem.partition("=")[0] for problem in caught.value.problems)
    assert wrong == ["optimizer.lr", "rollout.group_sizes", "trainer.foo"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("lr=1e-6", "did you mean optimizer.lr?"),
        ("seed=1", "did you mean trainer.seed or data.seed"),
        ("trainer.lr=1e-6", "did you mean optimizer.lr?"),
        ("optimiser.lr=1e-6", "did you mean optimizer?"),
        ("rollout.size=1", "did you mean rollout.group_size"),
        ("algorithm.loss={name: ppo, clip_hig: 1}", "did you mean algorithm.loss.clip_high?"),
        ("remote_agent.proxy_server_url=http://h:1", "here it is proxy_server.url"),
        ("proxy_server.tool_format=hermes", "here it is proxy_server.renderer"),
        ("actor_rollout_ref.rollout.n=8", "here it is rollout.group_size"),
        ("rollout.n=8", "here it is rollout.group_size"),
        ("ajet.rollout.num_repeat=4", "here it is rollout.group_size"),
        ("gconfig.n_samples=4", "here it is rollout.group_size"),
        ("trainer.total_epochs=3", "here it is trainer.steps"),
        ("trainer.dir=/runs", "here it is trainer.run_dir"),
        ("rollout.over_sample_threshold=1.2", "here it is rollout.over_sample, the share of"),
        (
            "ajet.swarm_mode_sample_collection_method=rollout_until_finish_enough_tasks",
            "here it is swarm.stop_rule",
        ),
        ("nothing.like_it=1", "the sections are: model, "),
    ],
)
def test_unknown_key_is_refused_with_the_key_that_was_probably_meant(
    file: Path, given: str, meant: str
) -> None:
    assert meant in error_of(file, given)


def test_every_key_of_an_unknown_section_is_named(file: Path, tmp_path: Path) -> None:
    verl = tmp_path / "verl.yaml"
    actor = {"actor": {"optim": {"lr": 1e-6}, "strategy": "fsdp"}, "rollout": {"n": 8}}
    verl.write_text(yaml.safe_dump({"actor_rollout_ref": actor}))
    with pytest.raises(ConfigError) as caught:
        load([file, verl])
    lr, strategy, n = caught.value.problems
    assert "actor_rollout_ref.actor.optim.lr=1e-06" in lr
    assert "here it is optimizer.lr" in lr
    assert "actor_rollout_ref.actor.strategy='fsdp'" in strategy
    assert "here it is rollout.group_size" in n


def test_every_successor_is_a_key() -> None:
    keys = {key.dotted for key in keys_of(TrainerConfig)}
    here = {*SUCCESSORS.values(), *SUCCESSORS_BY_LAST_NAME.values(), *ELSEWHERE.values()}
    named = {word.rstrip(",") for text in here for word in text.split() if "." in word}
    named = {word for word in named if not word.startswith(("examples.", "benchmarks/"))}
    assert named - keys <= {"algorithm.advantage.name"}


def test_unknown_key_on_the_command_line_is_refused_with_its_source_and_the_nearest_key(
    file: Path,
) -> None:
    text = error_of(file, "rollout.group_sizes=4")
    assert "rollout.group_sizes=4" in text
    assert "the command line" in text
    assert "did you mean rollout.group_size?" in text


def test_unknown_key_in_a_file_is_refused_with_the_files_path(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | {"trainner": {"steps": 3}}))
    text = error_of(path)
    assert "trainner" in text
    assert str(path) in text


def test_missing_key_is_refused_with_the_place_to_set_it(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"remote_agent": MINIMAL["remote_agent"]}))
    assert "model: missing" in error_of(path)


def test_value_out_of_range_is_refused_with_value_and_bound(file: Path) -> None:
    text = error_of(file, "rollout.group_size=0")
    assert "rollout.group_size=0" in text
    assert "greater than or equal to 1" in text


def test_environment_value_out_of_range_is_refused_with_its_source(file: Path) -> None:
    text = error_of(file, AGENTIC_TRAIN__ROLLOUT__TEMPERATURE="-1")
    assert "rollout.temperature=-1" in text
    assert "the environment" in text


def test_broken_value_is_refused_with_the_variables_name(file: Path) -> None:
    text = error_of(file, AGENTIC_TRAIN__PROXY_SERVER__TEMPLATE_KWARGS="{a: ")
    assert "AGENTIC_TRAIN__PROXY_SERVER__TEMPLATE_KWARGS" in text


def test_configuration_without_an_agent_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"model": {"path": "m"}, "remote_agent": {}}))
    assert "remote_agent.command.argv" in error_of(path)


def test_what_top_k_and_top_p_leave_must_be_recorded_and_be_known_to_the_model(file: Path) -> None:
    assert "set rollout.top_k, to at most that" in error_of(file, "rollout.top_p=0.9")
    assert "less than or equal to 20" in error_of(file, "rollout.top_k=21")
    said = error_of(file, "actor_rollout_ref.rollout.top_k=5")
    assert "here it is rollout.top_k" in said
    teacher = "algorithm.distillation.teacher=http://127.0.0.1:1"
    said = error_of(file, "rollout.top_k=5", "rollout.top_p=0.9", teacher)
    assert "scores tokens among the whole vocabulary" in said


@pytest.mark.parametrize("content", ["[1, 2]", "a: [", "just text"])
def test_file_that_is_not_a_mapping_is_refused_with_its_path(tmp_path: Path, content: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(content)
    assert str(path) in error_of(path)


@pytest.mark.parametrize(
    "content",
    [
        "hf_token: hunter2",
        "engine: {urls: 'http://:hunter2@gpu:8001'}",
        "remote_agent: {command: {env: hunter2}}",
        "engine: {urls: 'hunter2\nrollout: [",
    ],
)
def test_error_has_no_secret(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.yaml").write_text(content)
    with pytest.raises(ConfigError) as refused:
        load([tmp_path / "bad.yaml"], [], {})
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            b"model: {path: a}\nmodel: {path: b}\n",
            "line 2, column 1: the key 'model' is given twice",
        ),
        (b"model: {path: caf\xe9}\n", "characters that YAML does not allow"),
    ],
)
def test_file_with_a_key_twice_or_not_in_utf_8_is_refused_with_its_path(
    tmp_path: Path, content: bytes, says: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    assert f"--config {path}: not YAML: " in (error := error_of(path))
    assert says in error


def test_missing_configuration_file_is_refused_with_its_path(tmp_path: Path) -> None:
    assert "nothing.yaml" in error_of(tmp_path / "nothing.yaml")


def test_argument_without_a_value_is_refused_with_its_name(file: Path) -> None:
    assert "'rollout.group_size'" in error_of(file, "rollout.group_size")


def test_harbor_can_be_configured_by_the_names_of_verls_recipe(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "model": {"path": "m"},
                "data": {"harbor": {"train_dir": "tasks/train"}},
                "remote_agent": {"harbor": {"agent_name": "terminus-2"}},
            }
        )
    )
    environment = {
        "HARBOR_SERVER_URL": "http://h:8090",
        "HARBOR_DATASET_DIRS": "a:b",
        "REMOTE_AGENT_KWARGS": '{"max_turns": 3}',
        "REMOTE_AGENT_NAME": "codex",
    }
    config = load([path], ["remote_agent.harbor.agent_name=mini-swe-agent"], environment)
    harbor = config.remote_agent.harbor
    assert isinstance(harbor, HarborConfig)
    assert harbor.agent_name == "mini-swe-agent"
    assert harbor.server_url == "http://h:8090"
    assert harbor.agent_kwargs == {"max_turns": 3}
    in_yaml = load([path], ["remote_agent.harbor.dataset_dirs=[a, b]"]).remote_agent.harbor
    assert isinstance(in_yaml, HarborConfig)
    assert in_yaml.dataset_dirs == harbor.dataset_dirs == (Path("a"), Path("b"))
    assert config.data.private_files == (Path("tasks/train"),)


def test_flat_keys_of_verls_recipe_are_told_their_section(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    flat = {"agent_name": "codex", "harbor_server_url": "http://h:8090"}
    data = {"train_harbor_dir": "tasks/train"}
    path.write_text(yaml.safe_dump({"model": {"path": "m"}, "remote_agent": flat, "data": data}))
    text = error_of(path)
    for key in ("remote_agent.harbor.agent_name", "remote_agent.harbor.server_url"):
        assert f"here it is {key}" in text
    assert "here it is data.harbor.train_dir" in text


@pytest.mark.parametrize(
    ("given", "here"),
    [
        ("remote_agent.command.grace_s=1", "remote_agent.process.grace_s"),
        ("remote_agent.python.pass_env=[TOKEN]", "remote_agent.process.pass_env"),
        ("remote_agent.command.limits.cpu_s=9", "remote_agent.process.limits"),
        (
            "remote_agent.http={url: 'http://a/runs', log_bytes: 9}",
            "remote_agent.process.log_bytes",
        ),
        ("remote_agent.kubernetes={image: a, grace_s: 1}", "remote_agent.process.grace_s"),
        (
            "remote_agent.verifiers={env: a, process: {env: {A: b}}}",
            "remote_agent.verifiers.program",
        ),
        ("agents.shop.command.grace_s=1", "agents.shop.process.grace_s"),
        ("remote_agent.harbor={agent_name: a, server_urls: [u]}", "remote_agent.harbor.server_url"),
        (
            "remote_agent.kubernetes={image: a, node_selector: {a: b}}",
            "remote_agent.kubernetes.pod",
        ),
        ("data.harbor={overwrite: true}", "data.harbor.cache_dir, which can be deleted"),
        ("agents.shop.harbor_server_url=http://h:1", "agents.shop.harbor.server_url"),
    ],
)
def test_key_that_moved_is_refused_with_its_new_place(file: Path, given: str, here: str) -> None:
    assert f"there is no such key; here it is {here}" in error_of(file, given)


def test_command_and_a_harbor_agent_together_are_refused(tmp_path: Path) -> None:
    agent = {"command": {"argv": ["true"]}, "harbor": {"agent_name": "codex"}}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"model": {"path": "m"}, "remote_agent": agent}))
    assert "several agents: remote_agent.command, remote_agent.harbor" in error_of(path)


def test_groups_of_one_are_refused_if_the_baseline_is_the_groups_own(file: Path) -> None:
    text = error_of(file, "rollout.group_size=1")
    assert "rollout.group_size=1: algorithm.advantage.name=grpo compares" in text
    words = ["rollout.group_size=1", "algorithm.preset=reinforce++"]
    assert load([file], words).rollout.group_size == 1


def test_producer_of_ones_own_may_have_groups_of_one_because_it_may_add_branches(
    file: Path,
) -> None:
    producer = "{target: 'examples.branching.producers:trees', settings: {every: 2}}"
    words = ["rollout.group_size=1", f"rollout.producer={producer}", "algorithm.advantage=tree"]
    assert load([file], words).rollout.group_size == 1


@pytest.mark.parametrize("words", ["rollout.tree.every=2", "rollout.prefix.low=0.4"])
def test_trees_and_prefixes_are_refused_with_their_successor(file: Path, words: str) -> None:
    assert "rollout.producer, with the target examples.branching.producers:" in error_of(
        file, words
    )


def test_contradictions_between_sections_are_reported_at_once_each_with_its_keys(
    file: Path,
) -> None:
    overrides = ["engine.replicas=0", "engine.sleep=true", "trainer.mode=separate"]
    with pytest.raises(ConfigError) as caught:
        load([file], [*overrides, "rollout.group_size=1"])
    keys = [problem.partition(":")[0] for problem in caught.value.problems]
    assert keys == ["engine.replicas=0", "engine.sleep", "rollout.group_size=1"]


AGENT = "agents.shop.command.argv=[agent]"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["remote_agent.timeout_s=5"], "remote_agent: the run has `agents`; move the keys"),
        (["agents.shell.weight=2"], r"agents\.shell: no agent: set command\.argv"),
        (["agents.a/b.command.argv=[agent]"], r"agents\.'a/b': a name has at least one"),
        (["swarm={}"], "agents: a swarm's clients run the agents"),
        (["agents.shop.wieght=2"], r"did you mean agents\.shop\.weight\?"),
        (["agents.shop.comand.argv=[x]"], r"did you mean agents\.shop\.command\?"),
        (["agents.shop.weight=0"], "greater than 0"),
    ],
)
def test_agents_that_contradict_other_sections_are_refused(
    overrides: list[str], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        load([], ["model.path=/m", AGENT, *overrides])


def test_single_agent_and_several_agents_have_one_form() -> None:
    several = load([], ["model.path=/m", AGENT, "agents.shell.http.url=http://h"])
    assert list(several.agent_sections) == ["shop", "shell"]
    single = load([], ["model.path=/m", "remote_agent.command.argv=[agent]"])
    assert single.agent_sections == {"": single.remote_agent}
