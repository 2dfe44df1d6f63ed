"""The documentation is true of the code: links, commands, keys, code, names and signatures."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from areal_ray.cli.completion import commands_of
from areal_ray.cli.main import make_parser
from areal_ray.config import Config, check
from areal_ray.config_file import from_mapping, load
from areal_ray.config_keys import config_keys
from areal_ray.config_reference import reference, section_notes
from areal_ray.errors import ConfigError
from tests.documents import DOCUMENTS, REPO, Document

KEYS = {key.path for key in config_keys()}
SECTIONS = {section.path for section in section_notes() if section.path}

every_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=[document.path.name for document in DOCUMENTS]
)


@every_document
def test_every_link_leads_somewhere(document: Document) -> None:
    for link in document.links:
        path, _, anchor = link.partition("#")
        target = document.path.parent / path if path else document.path
        assert target.exists(), f"{document.path.name}: {link}"
        if anchor:
            assert anchor in Document(target).anchors, f"{document.path.name}: {link}"


@every_document
def test_every_file_of_the_project_that_is_named_is_there(document: Document) -> None:
    ours = re.compile(r"(?:tests|examples|benchmarks|docs|actors|placement)/[\w./]+\w")
    for code in document.inline_code:
        if ours.fullmatch(code):
            assert (REPO / code).exists(), f"{document.path.name}: {code}"


@every_document
def test_every_areal_ray_command_is_one(document: Document) -> None:
    for words in document.commands("areal-ray"):
        words = words[: words.index(">")] if ">" in words else words
        options, rest = make_parser().parse_known_args(words)
        assert not [word for word in rest if word.startswith("-")], words
        for override in [*getattr(options, "overrides", ()), *rest]:
            assert override.partition("=")[0] in KEYS, words
        if hasattr(options, "config"):
            _check_config(options.config, [*options.overrides, *rest])


def _check_config(named: str, overrides: list[str]) -> None:
    """Those that are here must load; others stand for the reader's own."""
    for path in (REPO / named, REPO / "examples" / named):
        if path.is_file():
            check(load(path, overrides))


@every_document
def test_commands_that_are_mentioned_exist_with_their_options(document: Document) -> None:
    known = {
        one.name: {flag for option in one.options for flag in option.flags}
        for one in commands_of(make_parser())
    }
    for code in document.inline_code:
        program, *words = code.split()
        if program == "areal-ray" and words:
            assert words[0] in known, code
            assert {word for word in words if word.startswith("--")} <= known[words[0]], code


@every_document
def test_every_ray_job_command_is_one(document: Document) -> None:
    from ray.dashboard.modules.job.cli import job_cli_group

    for program, *words in document.commands("ray"):
        assert program == "job", "the only one of Ray's that can be parsed without a cluster"
        job_cli_group.commands[words[0]].make_context(words[0], words[1:])


@every_document
def test_every_config_key_that_is_named_exists(document: Document) -> None:
    for code in document.inline_code:
        named = re.match(r"([a-z_0-9]+(?:\.[a-z_0-9]+)+)(?:$|=|: )", code)
        is_file = code.endswith((".png", ".html", ".json", ".jsonl", ".yaml"))
        if named and not is_file and named[1].partition(".")[0] in SECTIONS:
            assert named[1] in KEYS | SECTIONS, f"{document.path.name}: `{code}`"


@every_document
def test_yaml_that_is_shown_is_a_config(document: Document) -> None:
    import yaml

    for block in document.blocks("yaml"):
        from_mapping({"name": "shown"} | yaml.safe_load(block.text))


@every_document
def test_python_that_is_shown_compiles_and_imports_what_exists(document: Document) -> None:
    for block in document.blocks("python"):
        compile(
            block.text,
            document.path.name,
            "exec",
            ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
            dont_inherit=True,
        )
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("areal_ray"):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)


@every_document
def test_code_that_is_said_to_be_an_example_s_is(document: Document) -> None:
    for block in document.blocks("python"):
        first, _, rest = block.text.partition("\n")
        if named := re.fullmatch(r"# (examples/\w+\.py)", first):
            assert rest.strip() in (REPO / named[1]).read_text(), first


def test_the_guide_shows_examples() -> None:
    """Or the test before would hold for nothing."""
    shown = [block.text for block in Document(REPO / "docs" / "guide.md").blocks("python")]
    assert sum(text.startswith("# examples/") for text in shown) >= 3


def test_no_document_names_a_place_on_somebody_s_machine() -> None:
    for document in DOCUMENTS:
        assert not re.search(r"(/home/|/root/|/work/|/tmp/)", document.text), document.path.name


def test_the_config_s_reference_is_what_areal_ray_reference_prints() -> None:
    assert (REPO / "docs" / "config.md").read_text() == reference(), (
        "areal-ray reference > docs/config.md"
    )


def test_the_reference_tells_of_every_key() -> None:
    notes = {field.path: field for section in section_notes() for field in section.fields}
    assert set(notes) == KEYS
    assert [path for path, field in notes.items() if not field.note] == []
    assert notes["name"].default == "required"
    assert notes["trainer.lr"].default == "`1e-6`"
    assert notes["rollout.window"].default == "derived"
    assert notes["generation.gpu_memory"].expected == "a number > 0 and <= 1"
    assert notes["rollout.samples"].note == "Samples per prompt: the size of a group."


def test_a_part_of_the_reference_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    from areal_ray.cli.main import main

    assert main(["reference", "trainer.lora"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("## `trainer.lora`\n\nLow-rank adapters")
    assert "`trainer.lora.rank`" in shown
    assert "`trainer.lr`" not in shown
    assert main(["reference", "goal"]) == 0
    assert "mean reward is this high" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="trainer.lrr: there is no such key"):
        reference("trainer.lrr")


def test_the_docs_tell_of_every_metric() -> None:
    from areal_ray.observability.metrics import METRICS

    told = (REPO / "docs" / "operations.md").read_text()
    for metric in METRICS:
        assert f"| `{metric.full_name}` | {metric.kind}" in told
        assert f" | {metric.description} |" in told, metric.name


def test_the_docs_name_every_command() -> None:
    told = "".join(document.text for document in DOCUMENTS)
    for command in commands_of(make_parser()):
        assert f"areal-ray {command.name}" in told


def test_every_example_is_told_of() -> None:
    told = "".join(document.text for document in DOCUMENTS)
    shown = [
        path
        for path in Path(REPO / "examples").iterdir()
        if path.suffix in (".py", ".yaml", ".ipynb")
    ]
    assert [path.name for path in shown if f"examples/{path.name}" not in told] == []


def test_defaults_are_shown_as_an_override_would_have_them(tmp_path: Path) -> None:
    fields = [field for section in section_notes() for field in section.fields]
    overrides = [
        f"{field.path}={field.default.strip('`')}"
        for field in fields
        if field.default not in ("required", "derived")
    ]
    (tmp_path / "empty.yaml").write_text("name: x")
    assert load(tmp_path / "empty.yaml", overrides) == Config(name="x")
