"""Secrets: what is one, where `${env:NAME}` may stand, and that nothing of them is written."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from ddprun.cli import main
from ddprun.compare.runs import load_variant, make_variants
from ddprun.config import LoadedPipeline, PipelineError
from ddprun.config.secrets import REDACTED, Secrets, is_secret_name
from ddprun.engine import build

CANARY = "cAnArY-8c1f'\"\\x é/5"
DATA = """
data:
  mylab.data.Files:
    url: "https://reader:${env:PW}@host/x"
    api_token: "${env:API_TOKEN}"
    nested: [{headers: {auth_token: "Bearer ${env:API_TOKEN}"}}]
    key_dim: 64
    monkey: banana
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PW", "hunter2-hunter2")
    monkeypatch.setenv("API_TOKEN", CANARY)


def pipeline(data: str) -> str:
    return f"model: {{mlp: {{inputs: 64, outputs: 10}}}}\noptimizer: sgd\n{data}"


@pytest.mark.parametrize(
    "name",
    [
        *("API_KEY", "apiKey", "api-key", "hf_token", "HFToken", "password", "PGPASSWORD", "x.y.passwd"),
        *("AWS_SECRET_ACCESS_KEY", "credentials", "credential", "clientSecret", "passphrase"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    """The end of the name decides."""
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["monkey", "key", "PWD", "tokenizer", "pad_token", "max_tokens", "secretName", "secretary", "name"],
)
def test_names_that_are_none(name: str) -> None:
    """A word that only contains one of those words does not."""
    assert not is_secret_name(name)


@pytest.mark.usefixtures("environment")
def test_references_are_filled_for_a_run_and_stay_in_what_is_written(
    loaded: Callable[..., LoadedPipeline],
) -> None:
    """Whole strings and parts of strings, at any depth; what is written keeps the name."""
    found = loaded(pipeline(DATA), base=False)
    options = found.expand_env_and_folder("data", found.pipeline.train_data()).options
    assert options["url"] == "https://reader:hunter2-hunter2@host/x"
    assert options["api_token"] == CANARY
    assert options["nested"][0]["headers"]["auth_token"] == f"Bearer {CANARY}"
    assert (options["key_dim"], options["monkey"]) == (64, "banana")
    written = yaml.safe_load(found.resolved_yaml())["data"]["mylab.data.Files"]
    assert written == yaml.safe_load(DATA)["data"]["mylab.data.Files"]
    again = loaded(found.resolved_yaml(), base=False, name="again.yaml")
    assert again.digest() == found.digest()


def test_the_digest_does_not_depend_on_the_environment(
    loaded: Callable[..., LoadedPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host has an environment of its own, and nobody can guess at a password by its hash."""
    text = pipeline("data: {mylab.Files: {url: 'https://me:%s@host', at: '${env:SOMEWHERE}'}}\n")
    before = loaded(text % "one-password", base=False).digest()
    monkeypatch.setenv("SOMEWHERE", "somewhere-else")
    assert loaded(text % "two-password", base=False).digest() == before


def test_unset_variables_are_faults_all_at_once(
    loaded: Callable[..., LoadedPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their places, before a run starts; `check` needs no secrets."""
    for name in ("PW", "API_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    found = loaded(pipeline(DATA), base=False)
    with pytest.raises(PipelineError) as caught:
        found.check_environment()
    assert [(fault.place.line, fault.problem) for fault in caught.value.faults] == [
        (6, "the environment variable PW is not set"),
        (7, "the environment variable API_TOKEN is not set"),
        (8, "the environment variable API_TOKEN is not set"),
    ]
    assert caught.value.faults[2].path == 'data."mylab.data.Files".nested[0].headers.auth_token'
    with pytest.raises(PipelineError):
        build.build_datasets(found)


@pytest.mark.parametrize(
    "bad", ["${env:}", "${env:1A}", "${env:A B}", "${env:A", "x${env:A}${env:-}", "${env:${env:A}}"]
)
def test_a_malformed_reference_is_a_fault(loaded: Callable[..., LoadedPipeline], bad: str) -> None:
    """It would otherwise reach the user's code as it is."""
    with pytest.raises(PipelineError, match=r'"\$\{env:" is not followed by a variable'):
        loaded(pipeline(f"data: {{mylab.Files: {{url: '{bad}'}}}}\n"), base=False)


def test_a_reference_between_braces_needs_quotes(loaded: Callable[..., LoadedPipeline]) -> None:
    """YAML ends an unquoted value at the brace; the fault says what to do."""
    with pytest.raises(PipelineError, match=r'put "\$\{env:NAME\}" in quotes'):
        loaded(pipeline("data: {mylab.Files: {url: ${env:A}, b: 1}}\n"), base=False)


def test_a_reference_where_no_string_is_wanted_is_a_fault(loaded: Callable[..., LoadedPipeline]) -> None:
    """Names of choices, numbers and fixed words cannot come from the environment."""
    for override in ("seed=${env:A}", "model=${env:A}", "precision=${env:A}", "name=${env:A}"):
        with pytest.raises(PipelineError):
            loaded("", override)


@pytest.mark.usefixtures("environment")
def test_files_of_text_may_come_from_the_environment(
    loaded: Callable[..., LoadedPipeline], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A built-in's strings too."""
    (tmp_path / "a.txt").write_bytes(bytes(range(200)) * 30)
    monkeypatch.setenv("CORPUS", str(tmp_path))
    text = "model: transformer\noptimizer: sgd\ndata: {text: {files: ['${env:CORPUS}/*.txt']}}\n"
    found = loaded(text, base=False)
    assert build.build_datasets(found)[0] is not None
    assert "${env:CORPUS}/*.txt" in found.resolved_yaml()


@pytest.mark.parametrize("name", ["password", "api_key", "hub-token"])
def test_a_literal_secret_is_refused(loaded: Callable[..., LoadedPipeline], name: str) -> None:
    """In the file and by `--set`; what is shorter than a secret may be a special token of a model's."""
    with pytest.raises(PipelineError) as caught:
        loaded(pipeline(f"data: {{mylab.Files: {{x: {{{name}: hunter2-hunter2}}}}}}\n"), base=False)
    (fault,) = caught.value.faults
    assert fault.path == f'data."mylab.Files".x.{name}'
    assert fault.message == "a secret in plain text; write ${env:NAME} and set the variable"
    assert "hunter2" not in str(fault)
    with pytest.raises(PipelineError, match="a secret in plain text"):
        loaded("", "data={mylab.Files: {}}", f"data.mylab.Files.{name}=hunter2-hunter2")
    loaded("", f"data={{mylab.Files: {{{name}: 12345678}}}}")
    found = loaded("", "data={mylab.Files: {eos_token: '<|endoftext|>', img_token: '<img>'}}")
    assert 'eos_token: "<|endoftext|>"' in found.resolved_yaml()


def test_the_password_in_a_url_is_masked_and_does_not_load_again(
    loaded: Callable[..., LoadedPipeline],
) -> None:
    """A marker stands in the resolved pipeline, and a run of that says what to write instead."""
    url = "https://me:pa-ss-wo-rd@host/"
    found = loaded(pipeline(f"data: {{mylab.Files: {{url: '{url}'}}}}\n"), base=False)
    assert found.pipeline.train_data().options["url"] == url
    written = found.resolved_yaml()
    assert f'url: "https://me:{REDACTED}@host/"' in written
    with pytest.raises(PipelineError, match="the password that was here is not written"):
        loaded(written, base=False, name="again.yaml")


def test_a_value_that_the_file_takes_is_written_by_its_name_wherever_it_stands(
    loaded: Callable[..., LoadedPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the file has it as it is; shorter ones would stand in too many words."""
    monkeypatch.setenv("HUB", "hf-01234")
    monkeypatch.setenv("SIZE", "7654321")
    monkeypatch.setenv("OTHER_TOKEN", "not-taken-by-the-file")
    data = "{mylab.Files: {a: '${env:HUB}', b: 'x hf-01234', c: '${env:SIZE}', d: '7654321'}}"
    found = loaded(pipeline(f"data: {data}\n"), base=False)
    written = yaml.safe_load(found.resolved_yaml())["data"]["mylab.Files"]
    assert written == {"a": "${env:HUB}", "b": "x ${env:HUB}", "c": "${env:SIZE}", "d": "7654321"}
    told = found.secrets.redact_all({"hf-01234": [("at hf-01234/", 7654321)], "x": "not-taken-by-the-file"})
    assert told == {"hf-01234": [("at ${env:HUB}/", 7654321)], "x": "not-taken-by-the-file"}


def test_a_choice_may_be_called_like_a_secret(loaded: Callable[..., LoadedPipeline]) -> None:
    """The name of a package or a hook says nothing about its options."""
    found = loaded("hooks: [{mylab.key.Hook: {mode: slow}}]\n")
    assert "mode: slow" in found.resolved_yaml()


@pytest.mark.parametrize(
    "text",
    [
        "data: {mylab.Files: {password: %s, x: [}}\n",
        "data: {mylab.Files: {credentials: [abc, %s], x: [}}\n",
        "data: {mylab.Files: {password: %s}}\nmodel: %s\n",
        "data: {mylab.Files: {password: %s}}\nseed: %s\n",
        "data: {mylab.Files: {api_key: %s}, other: 1}\n",
        "data: {password: %s}\n",
        "data: {mylab.Files: {credentials: [%s, 1, 2]}, x: 1}\n",
        "data: {digits: {held_out: 7, token: %s}}\n",
        "data: {mylab.Files: {url: 'https://u:%s@h/'}}\nseed: 'https://u:%s@h/'\n",
        "data: {mylab.Files: {url: 'https://u:%s@h/', y: 1}, x: 'https://u:%s@h/'}\n",
        "data: {mylab.Files: {url: 'https://h/?a=1&access_token=%s'}}\nprecision: 7\n",
        "data:\n  mylab.Files:\n    password: %s\n   x: 1\n",
    ],
)
@pytest.mark.parametrize("form", ["text", "json", "github"])
def test_no_fault_shows_a_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, form: str
) -> None:
    """Not in its words, cut to length or not, nor in the line that it quotes, even if that is no YAML."""
    secret = "canary-" + "0123456789" * 6
    path = tmp_path / "p.yaml"
    path.write_text(pipeline(text.replace("%s", secret)))
    assert main(["check", str(path), "--format", form]) == 2
    printed = capsys.readouterr()
    assert "canary" not in printed.out + printed.err
    assert "0123456789" not in printed.out + printed.err
    assert "p.yaml" in printed.out


@pytest.mark.parametrize(
    "override",
    [
        "data.password=%s",
        "data.mylab.Files.password=[%s",
        "track=[{wandb: {api_key: %s",
        "data={mylab.Files: {password: %s}, x: 1}",
        "seed=https://u:%s@h",
        "model.mlp.api_key=%s",
        "api_key=%s",
    ],
)
def test_no_fault_of_an_override_shows_a_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str
) -> None:
    """The same for `--set`, whose text is quoted too."""
    path = tmp_path / "p.yaml"
    path.write_text(pipeline("data: digits\n"))
    assert main(["check", str(path), "--set", override.replace("%s", "canary-canary")]) == 2
    printed = capsys.readouterr()
    assert "canary" not in printed.out + printed.err
    assert "--set 1" in printed.out


@pytest.mark.parametrize("command", ["compare", "tune"])
@pytest.mark.parametrize(
    "vary",
    [
        "track=[{wandb: {api_key: %s",
        "track={wandb: {api_key: %s}}",
        "data.mylab.Files.password=%s",
        "data.mylab.Files.password=[%s",
        "api_key",
    ],
)
def test_no_fault_of_vary_shows_a_secret(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    vary: str,
) -> None:
    """Nor of `--vary`, which is not part of any pipeline."""
    path = tmp_path / "p.yaml"
    path.write_text(pipeline("data: digits\n"))
    assert main([command, str(path), f"--vary={vary.replace('%s', 'canary-canary')}"]) == 2
    printed = capsys.readouterr()
    assert "canary" not in printed.out + printed.err
    assert "--vary 1" in printed.err


def test_no_variant_of_a_comparison_is_called_by_a_secret(tmp_path: Path) -> None:
    """Its name is in the table, in the page and in faults."""
    path = tmp_path / "p.yaml"
    path.write_text(pipeline("data: digits\n"))
    vary = [("track", ["[{mlflow: {tracking_uri: 'https://u:canary-canary@h'}}]", "[]"])]
    variants = make_variants([path], (), vary, noop=False, twin=True)
    names = [load_variant(one)[0].name for one in variants]
    assert names == [
        "track=[{mlflow: {tracking_uri: 'https://u:[redacted]@h'}}]",
        "track=[{mlflow: {tracking_uri: 'https://u:[redacted]@h'}}] (twin)",
        "track=[]",
    ]


def test_a_line_with_a_secret_is_not_quoted(loaded: Callable[..., LoadedPipeline]) -> None:
    """The fault has its place all the same: the column is the file's own."""
    with pytest.raises(PipelineError) as caught:
        loaded(pipeline("data: {digits: {password: canary-canary, held_out: 7}}\n"), base=False)
    fault = next(fault for fault in caught.value.faults if "held_out" in fault.path)
    assert "\n" not in str(fault)
    assert fault.place.column == 1 + "data: {digits: {password: canary-canary, held_out: 7}}".index("7")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("GET https://u:p@ss:w@host/a failed", "GET https://u:[redacted]@host/a failed"),
        (
            "https://:secret@h/ https://${env:U}:secret@h/",
            "https://:[redacted]@h/ https://${env:U}:[redacted]@h/",
        ),
        ("https://h/?a=1&api_key=abc&b=2", "https://h/?a=1&api_key=[redacted]&b=2"),
        ("ssh://git@host/x and a@b.c", "ssh://git@host/x and a@b.c"),
        ("https://u:${env:PW}@h/", "https://u:${env:PW}@h/"),
        ("http://[::1]:80/x@y", "http://[::1]:80/x@y"),
        ("http://host:8080/a http://user@host:1/", "http://host:8080/a http://user@host:1/"),
    ],
)
def test_passwords_in_urls(text: str, told: str) -> None:
    """Also in URLs that no pipeline named."""
    assert Secrets().redact(text) == told


def test_nothing_takes_long() -> None:
    """64 KiB of anything are redacted within moments."""
    secrets = Secrets({f"value-{n}-{n}": f"${{env:V{n}}}" for n in range(200)})
    units = (
        "a",
        "a:",
        "${env:A}",
        "password: ${env:A}",
        "${",
        "https://",
        "://a",
        "?a",
        "&api_key=",
        "token: ",
    )
    for unit in (*units, "token", "a@", " ", '"', "token:'"):
        text = (unit * 65536)[:65536]
        start = time.process_time()
        secrets.redact_line(text)
        secrets.redact("https://" + text)
        assert time.process_time() - start < 1, unit


SECRET = st.text(st.characters(codec="utf-8", exclude_characters="${}"), min_size=8, max_size=40).filter(
    lambda text: text == text.strip() and "://" not in text
)


@given(secret=SECRET, around=st.text(max_size=12))
def test_a_secret_is_found_wherever_it_stands(secret: str, around: str) -> None:
    """By its exact value, within words, too, in everything that is written."""
    assume(secret not in f"${{env:TAKEN}}{around}${{env:TAKEN}}")
    secrets = Secrets({secret: "${env:TAKEN}"})
    told = secrets.redact_all({"a": [f"{around}{secret}{around}", (secret,)], "b": {"c": secret}, "d": 1})
    assert secret not in [*told["a"], *told["a"][1], told["b"]["c"]]
    assert told["d"] == 1
    assert told["b"]["c"] == "${env:TAKEN}"


STRANGERS = [
    ("track", "[{mlflow: {tracking_uri: 'http://evil.example', experiment: '${env:NAME}'}}]"),
    ("track", "[{mlflow: {tracking_uri: 'http://evil.example/${env:NAME}'}}]"),
    ("track", "[{wandb: {mode: offline, project: 'x-${env:NAME}'}}]"),
    ("data", "{mylab.Files: {url: 'https://me:${env:NAME}@evil.example'}}"),
    ("data", "{mylab.Files: {nested: [{x: ['${env:NAME}']}]}}"),
    ("init", "'https/${env:NAME}.safetensors'"),
    ("groups", "[{match: '*', lr: 1, x: '${env:NAME}'}]"),
]


@pytest.mark.parametrize(("key", "value"), STRANGERS)
def test_a_secrets_variable_goes_into_secret_options_only(
    loaded: Callable[..., LoadedPipeline], key: str, value: str
) -> None:
    """Elsewhere it would be sent or written; `check` says so, whatever is trusted and set."""
    with pytest.raises(PipelineError) as caught:
        loaded("", f"{key}={value.replace('NAME', 'AWS_SECRET_ACCESS_KEY')}")
    problem = "AWS_SECRET_ACCESS_KEY has the name of a secret, so only an option with such a name may hold it"
    assert problem in [fault.problem for fault in caught.value.faults]


@pytest.mark.parametrize("name", ["HF_TOKEN", "SCRATCH"])
@pytest.mark.parametrize(
    ("path", "override"),
    [
        ("stages[0].save.to", "stages=[{save: {to: 'x-NAME.safetensors'}}]"),
        ("track[0].mlflow.tracking_uri", "track=[{mlflow: {tracking_uri: 'file:/stores/NAME'}}]"),
        ("track[0].mlflow.tracking_uri", "track=[{mlflow: {tracking_uri: 'sqlite:///NAME.db'}}]"),
        ("track[0].mlflow.tracking_uri", "track=[{mlflow: {tracking_uri: 'stores/NAME'}}]"),
    ],
)
def test_no_variable_names_a_file_that_is_written(
    loaded: Callable[..., LoadedPipeline], path: str, override: str, name: str
) -> None:
    with pytest.raises(PipelineError) as caught:
        loaded("", override.replace("NAME", f"${{env:{name}}}"))
    problems = {fault.path: fault.problem for fault in caught.value.faults}
    assert problems[path] == "${env:NAME} is not filled in for the name of a file that is written"


@pytest.mark.parametrize("uri", ["${env:SERVER}", "${env:SERVER}/x", "https://${env:SERVER}:${env:PORT}/x"])
def test_variables_say_where_a_server_is(loaded: Callable[..., LoadedPipeline], uri: str) -> None:
    loaded("", f"track=[{{mlflow: {{tracking_uri: '{uri}'}}}}]")


@pytest.mark.parametrize(
    ("key", "override"),
    [
        ("name", "name='TEXT'"),
        ("docker.runs", "docker={runs: '/TEXT'}"),
        ("docker.mounts", "docker={mounts: {/x: '/TEXT'}}"),
        ("kubernetes.runs", "kubernetes={runs: 'TEXT'}"),
        ("kubernetes.claims", "kubernetes={claims: {data: '/TEXT'}}"),
        ("slurm.options.output", "slurm={options: {output: 'TEXT'}}"),
    ],
)
def test_other_names_of_folders_take_no_variable(
    loaded: Callable[..., LoadedPipeline], key: str, override: str
) -> None:
    """The run's own folder, and those of jobs: what their values may be leaves no room for one."""
    with pytest.raises(PipelineError) as caught:
        loaded("", override.replace("TEXT", "x-${env:SCRATCH}"))
    assert any(fault.path.startswith(key) for fault in caught.value.faults)


def test_with_a_limit_only_named_variables_are_filled_in(
    loaded: Callable[..., LoadedPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's pipeline could take any other to any server; the same in `check` and in a run."""
    asked = "data={mylab.Files: {url: 'https://${env:SERVER}', token: '${env:HF_TOKEN}'}}"
    loaded("", asked)
    monkeypatch.setenv("DDPRUN_TRUSTED", "mylab")
    for named, refused in (
        (None, {"SERVER": "SERVER", "HF_TOKEN": "HF_TOKEN"}),
        (" ,", {"SERVER": "SERVER", "HF_TOKEN": "HF_TOKEN"}),
        ("SERVER", {"HF_TOKEN": "SERVER,HF_TOKEN"}),
        ("HF_TOKEN, OTHER", {"SERVER": "HF_TOKEN,OTHER,SERVER"}),
    ):
        if named is not None:
            monkeypatch.setenv("DDPRUN_ENV", named)
        with pytest.raises(PipelineError) as caught:
            loaded("", asked)
        assert [(fault.problem, fault.allowed) for fault in caught.value.faults] == [
            (
                f"{name} is not filled in: DDPRUN_TRUSTED is set, and DDPRUN_ENV lacks it",
                f"if the pipeline may have its value, set DDPRUN_ENV={names}",
            )
            for name, names in refused.items()
        ]
    monkeypatch.setenv("DDPRUN_ENV", "SERVER, HF_TOKEN")
    monkeypatch.setenv("SERVER", "data.example")
    monkeypatch.setenv("HF_TOKEN", "hf-0123456789")
    found = loaded("", asked)
    assert found.expand_env_and_folder("data", found.pipeline.data).options == {
        "url": "https://data.example",
        "token": "hf-0123456789",
    }
