"""Workload generators, one file per shape, each with its source. `GENERATORS` has them by name with bound settings."""

import random
from dataclasses import replace
from functools import partial

from pointsman.simulation.workload.arrivals import DayShape, diurnal
from pointsman.simulation.workload.generators.agent_loops import AgentShape, agent_loops
from pointsman.simulation.workload.generators.base import Generator
from pointsman.simulation.workload.generators.batch_classification import batch_classification
from pointsman.simulation.workload.generators.chat import ChatShape, chat
from pointsman.simulation.workload.generators.clients import LONGER_PREFIXES, MORE_REQUESTS, WELL_BEHAVED, Clients
from pointsman.simulation.workload.generators.code_completion import CompletionShape, code_completion
from pointsman.simulation.workload.generators.generated_shared_prefix import GspShape, gsp
from pointsman.simulation.workload.generators.llm_as_judge import JudgeShape, llm_as_judge
from pointsman.simulation.workload.generators.long_document_qa import LongDocumentShape, long_document_qa
from pointsman.simulation.workload.generators.mixed_day import mixed_day
from pointsman.simulation.workload.generators.rag import RagShape, rag
from pointsman.simulation.workload.generators.tools import tools
from pointsman.simulation.workload.generators.tree_of_thoughts import TreeShape, tree_of_thoughts
from pointsman.simulation.workload.generators.two_hot_prefixes import two_hot_prefixes
from pointsman.simulation.workload.requests import WorkloadRequest


def chat_diurnal(count: int, *, rate: float, chance: random.Random) -> list[WorkloadRequest]:
    requests = chat(count, rate=rate, chance=chance)
    day = requests[-1].arrival_s if requests else 0.0
    return diurnal(requests, shape=DayShape(day_s=day)) if day else requests


HALF_SHARED = GspShape(groups=128, prompts_per_group=32, prefix_tokens=4096, question_tokens=4096, range_ratio=0.125)
"""As in *Randomization Boosts KV Caching*: half of each prompt is shared, lengths are mixed up to 8,192."""

MORE_QUESTIONS = Clients(requests_factor=10.0)
LONGER_DOCUMENTS = Clients(prefix_factor=2.0)
CLIENTS_READ = LongDocumentShape(document_blocks_min=12, document_blocks_max=28, documents=120, clients=WELL_BEHAVED)
"""Documents that can be twice as long and still fit."""

LENGTH_CLASSES = GspShape(
    groups=128, prompts_per_group=32, output_tokens=4, lengths=(512, 1024, 2048, 4096, 8192), prefix_share=0.5
)
"""That paper's load as its code makes it: five lengths by group, answers of four tokens, 12 requests a second."""

LONG_LOOPS = AgentShape(
    system_prompt_blocks=(30, 4, 18), steps_max=48, result_tokens=900.0, tool_s=4.0, person_share=0.02, companies=5
)
WIDE_COLLECTIONS = RagShape(
    tenants=4,
    instruction_blocks=(6, 1),
    documents=700,
    zipf_exponent=0.8,
    document_blocks=(1, 3, 5),
    retrieved=(3, 7),
    questions_max=5,
)
FEW_REPOSITORIES = CompletionShape(
    repositories=7, context_blocks_min=8, context_blocks_max=20, commit_share=0.3, file_blocks_max=20, moved_share=0.2
)
TEAM_REPOSITORIES = CompletionShape(
    repositories=12, context_blocks_min=5, context_blocks_max=15, commit_share=0.2, file_blocks_max=14, pause_s=4.0
)
LASTING_CHAT = ChatShape(system_prompt_blocks=(8, 5, 1), turns=14.0, question_tokens=250.0, think_s=15.0)
BRISK_CHAT = ChatShape(system_prompt_blocks=(12, 1), turns=7.0, question_tokens=600.0, think_s=8.0)

GENERATORS: dict[str, Generator] = {
    "chat": chat,
    "chat_diurnal": chat_diurnal,
    "tools": tools,
    "gsp": gsp,
    "gsp_mixed": partial(gsp, shape=GspShape(range_ratio=0.25)),
    "gsp_round_robin": partial(gsp, shape=GspShape(order="round_robin")),
    "gsp_half_shared": partial(gsp, shape=HALF_SHARED),
    "gsp_half_shared_round_robin": partial(gsp, shape=replace(HALF_SHARED, order="round_robin")),
    "gsp_classes": partial(gsp, shape=LENGTH_CLASSES),
    "gsp_classes_30": partial(gsp, shape=replace(LENGTH_CLASSES, prefix_share=0.3)),
    "gsp_classes_90": partial(gsp, shape=replace(LENGTH_CLASSES, prefix_share=0.9)),
    "long_document_qa": long_document_qa,
    "long_document_qa_s1": partial(long_document_qa, shape=replace(CLIENTS_READ, clients=MORE_QUESTIONS)),
    "long_document_qa_s2": partial(long_document_qa, shape=replace(CLIENTS_READ, clients=LONGER_DOCUMENTS)),
    "tree_of_thoughts": tree_of_thoughts,
    "tree_of_thoughts_s1": partial(tree_of_thoughts, shape=TreeShape(clients=MORE_REQUESTS)),
    "tree_of_thoughts_s2": partial(tree_of_thoughts, shape=TreeShape(clients=LONGER_PREFIXES)),
    "llm_as_judge": llm_as_judge,
    "llm_as_judge_s1": partial(llm_as_judge, shape=JudgeShape(clients=MORE_REQUESTS)),
    "llm_as_judge_s2": partial(llm_as_judge, shape=JudgeShape(clients=LONGER_PREFIXES)),
    "two_hot_prefixes": two_hot_prefixes,
    "agent_loops": agent_loops,
    "rag": rag,
    "code_completion": code_completion,
    "batch_classification": batch_classification,
    "mixed_day": mixed_day,
    "agent_loops_long": partial(agent_loops, shape=LONG_LOOPS),
    "rag_wide": partial(rag, shape=WIDE_COLLECTIONS),
    "code_completion_few": partial(code_completion, shape=FEW_REPOSITORIES),
    "chat_brisk": partial(chat, shape=BRISK_CHAT),
    "code_completion_team": partial(code_completion, shape=TEAM_REPOSITORIES),
    "chat_lasting": partial(chat, shape=LASTING_CHAT),
}
"""`_s1`: one client sends more requests; `_s2`: one client's prefixes are longer."""

HELD_OUT = ("agent_loops_long", "rag_wide", "code_completion_team", "chat_lasting")
"""No rule, policy or default was chosen or looked at on these. Whoever looks at one to choose something removes it here."""

__all__ = ["GENERATORS", "HELD_OUT", "Generator"]
