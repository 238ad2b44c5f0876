"""The shape of the paper's appendix C, synthetically: 636 requests, 1,347 unique message nodes, ten leaves."""

import pytest
from trajectory_helpers import TOOLS, Policy, answer_text, result, system, user

from gyre.chat.conversation import Conversation
from gyre.core.records import RoleClass
from gyre.samples.admission import admit
from gyre.samples.rows import build_row
from gyre.trajectory.tree import TrajectoryTree

MAIN, SUMMARY = RoleClass.MAIN, RoleClass.MAIN_SUMMARY
SUB, SUB_SUMMARY = RoleClass.SUB_AGENT, RoleClass.SUB_AGENT_SUMMARY


class Agent:
    """Plays turns with a given number of tool results each, and remembers the messages of its last path."""

    def __init__(self, policy, prompt, task, role, agent_id=""):
        self.policy, self.role, self.agent_id = policy, role, agent_id
        self.messages = (system(prompt), user(task))
        self.paths = {}

    def ask(self, messages, text, role=None):
        record, emitted = self.policy.ask(
            Conversation(messages, TOOLS), text, role=role or self.role, agent_id=self.agent_id
        )
        self.paths[record.call_id] = (*messages, emitted)
        return record, emitted

    def play(self, turns, results):
        """`turns` turns with `results` tool results together, spread evenly."""
        for index in range(turns):
            count = results // turns + (index < results % turns)
            calls = tuple(("Bash", {"command": f"{index}.{n}"}) for n in range(count))
            _, emitted = self.ask(self.messages, answer_text(f"t{index}", calls))
            self.messages = (*self.messages, emitted, *(result(call, "out") for call in emitted.tool_calls))

    def finish(self):
        """The last response of a path; what it calls is never answered."""
        return self.ask(self.messages, answer_text("end", (("Bash", {"command": "delegate"}),)))[0]

    def summarise(self, role):
        return self.ask((*self.messages, user("CRITICAL: Respond with TEXT ONLY")), f"summary of {self.agent_id}", role)


@pytest.fixture(scope="module")
def execution(renderer, tokenizer):
    tree = TrajectoryTree("f3ad38e5", renderer)
    policy = Policy(tree, renderer, tokenizer)
    agents = []

    def agent(*arguments):
        agents.append(Agent(policy, *arguments))
        return agents[-1]

    main = agent("the main agent", "build the repository", MAIN)
    main.play(83, 84)  # with the task: 168 messages after the system prompt
    main.finish()
    _, summary = main.summarise(SUMMARY)
    catalog = agent("a sub-agent", "catalog", SUB, "a1")
    catalog.play(96, 96)  # 193 messages
    catalog.finish()
    _, sub_summary = catalog.summarise(SUB_SUMMARY)
    for task, agent_id, turns, results in (
        ("continued: " + sub_summary.text, "a1", 78, 79),
        ("fdw, first attempt", "a2", 25, 25),
        ("fdw, second attempt", "a3", 99, 100),
        ("dbt", "a4", 66, 67),
        ("pipeline", "a5", 68, 69),
    ):
        sub = agent("a sub-agent", task, SUB, agent_id)
        sub.play(turns, results)
        sub.finish()
    again = agent("the main agent", "continued: " + summary.text, MAIN)
    again.play(111, 179)
    again.finish()
    return tree, {call_id: path for one in agents for call_id, path in one.paths.items()}


def test_requests_leaves_and_message_nodes(execution):
    tree, paths = execution
    assert len(tree) == 636
    leaves = tree.leaves()
    assert sorted(leaf.record.role for leaf in leaves) == sorted([MAIN] * 2 + [SUMMARY] + [SUB] * 6 + [SUB_SUMMARY])
    expanded = [paths[leaf.call_id] for leaf in leaves]
    assert sum(map(len, expanded)) == 1716
    assert (min(map(len, expanded)), max(map(len, expanded))) == (53, 293)
    unique = set()
    for path in expanded:
        node = ()
        for message in path:
            node = hash((node, message.role, message.text, message.tool_call_id, repr(message.tool_calls)))
            unique.add(node)
    assert len(unique) == 1347


def test_shared_prefixes_are_stored_once(execution, renderer):
    tree, paths = execution
    by_role = {role: [leaf for leaf in tree.leaves() if leaf.record.role is role] for role in RoleClass}
    for summary, task, messages in (
        (by_role[SUMMARY][0], by_role[MAIN][0], 168),
        (by_role[SUB_SUMMARY][0], by_role[SUB][0], 193),
    ):
        common = 0
        for a, b in zip(paths[summary.call_id], paths[task.call_id], strict=False):
            if a != b:
                break
            common += 1
        assert common == 1 + messages
        in_summary = {step.call_id for step in tree.path_steps(summary.call_id) if step.covered}
        in_task = {step.call_id for step in tree.path_steps(task.call_id) if step.covered}
        assert in_summary - {summary.call_id} == in_task - {task.call_id}
    expanded = sum(len(tree.path_ids(leaf.call_id)) for leaf in tree.leaves())
    assert tree.unique_tokens < expanded


def test_admission_takes_both_mains_the_main_summary_and_one_sub_agent(execution):
    tree, _ = execution
    for seed in range(8):
        admitted = admit(tree, j_max=4, seed=seed)
        assert sorted(path.role for path in admitted[:2]) == [MAIN, MAIN]
        assert [path.role for path in admitted] == [MAIN, MAIN, SUMMARY, SUB]
    every = admit(tree, j_max=None, seed=0)
    sampled = sum(node.output_len for node in tree.nodes)
    assert sum(path.target_count for path in every) == sampled
    assert sum(len(build_row(tree, path).targets) for path in every) == sampled
