"""Secrets: what is one, where `${env:NAME}` may stand, and that nothing of them is written."""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ddprun.cli import main
from ddprun.compare.runs import load_variant, make_variants
from ddprun.config import LoadedPipeline, PipelineError, load
from ddprun.config.secrets import REDACTED, PipelineString, Secrets, cannot_be_secret, is_secret_name
from ddprun.engine import build

CANARY = "cAnArY-8c1f'\"\\x é/5"
DATA = """
data:
  mylab.data.Files:
    url: "https://reader:${env:PW}@host/x"
    api_token: "${env:API_TOKEN}"
    nested: [{headers: {auth_key: "Bearer ${env:API_TOKEN}"}}]
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
        *("API_KEY", "apiKey", "api-key", "hf_token", "HFToken", "password", "DB_PASSWORD_2", "Key"),
        *("awsSecretAccess", "credentials", "x.y.passwd", "PGPASSWORD"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    """One word of the name decides, however words are put together."""
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["monkey", "keyboard", "PWD", "tokenizer", "keys", "max_tokens", "Keyed", "secretary", "name"]
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
    options = found.fill_placeholders("data", found.pipeline.train_data()).options
    assert options["url"] == "https://reader:hunter2-hunter2@host/x"
    assert options["api_token"] == CANARY
    assert options["nested"][0]["headers"]["auth_key"] == f"Bearer {CANARY}"
    assert (options["key_dim"], options["monkey"]) == (64, "banana")
    written = yaml.safe_load(found.resolved_yaml())["data"]["mylab.data.Files"]
    assert written == yaml.safe_load(DATA)["data"]["mylab.data.Files"]
    again = loaded(found.resolved_yaml(), base=False, name="again.yaml")
    assert again.digest() == found.digest()


def test_the_digest_does_not_depend_on_the_environment(
    loaded: Callable[..., LoadedPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host has an environment of its own, and nobody can guess at a literal secret by its hash."""
    text = pipeline("data: {mylab.Files: {url: somewhere-else, password: %s}}\n")
    before = loaded(text % "one-password", base=False).digest()
    monkeypatch.setenv("SOME_TOKEN", "somewhere-else")
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
    assert [(fault.line, fault.problem) for fault in caught.value.faults] == [
        (6, "the environment variable PW is not set"),
        (7, "the environment variable API_TOKEN is not set"),
        (8, "the environment variable API_TOKEN is not set"),
    ]
    assert caught.value.faults[2].path == 'data."mylab.data.Files".nested[0].headers.auth_key'
    with pytest.raises(PipelineError):
        build.build_data(found)


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
    assert build.build_data(found).train is not None
    assert "${env:CORPUS}/*.txt" in found.resolved_yaml()


def test_literal_secrets_are_redacted_and_do_not_load_again(loaded: Callable[..., LoadedPipeline]) -> None:
    """A marker stands in the resolved pipeline, and a run of that says what to write instead."""
    data = (
        f"data: {{mylab.Files: {{password: {json.dumps(CANARY)}, credentials: {{user: somebody}}, "
        'url: "https://me:pa-ss-wo-rd@host/", "key": 7, "ref": "x pa-ss-wo-rd y", empty_token: ""}}}}\n'
    ).replace("}}}}", "}}")
    found = loaded(pipeline(data), base=False)
    written = found.resolved_yaml()
    assert yaml.safe_load(written)["data"]["mylab.Files"] == {
        "password": REDACTED,
        "credentials": {"user": REDACTED},
        "url": f"https://{REDACTED}@host/",
        "key": 7,
        "ref": f"x {REDACTED} y",
        "empty_token": "",
    }
    with pytest.raises(PipelineError) as caught:
        loaded(written, base=False, name="again.yaml")
    assert {fault.path.rpartition(".")[2] for fault in caught.value.faults} == {
        "password",
        "user",
        "url",
        "ref",
    }
    assert all("the secret that was here" in fault.problem for fault in caught.value.faults)
    options = found.pipeline.train_data().options
    assert options["password"] == CANARY


def test_what_the_environment_holds_is_written_by_its_name(
    loaded: Callable[..., LoadedPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A literal that a variable of a secret's name holds becomes that name, and the file loads again if such
    a variable may stand there.
    """
    monkeypatch.setenv("HUB_TOKEN", "hf-0123456789")
    found = loaded(pipeline("data: {mylab.Files: {token: 'x=hf-0123456789'}}\n"), base=False)
    assert 'token: "[redacted]"' in found.resolved_yaml()
    found = loaded(pipeline("data: {mylab.Files: {url: 'https://h/?x=hf-0123456789'}}\n"), base=False)
    assert '"https://h/?x=${env:HUB_TOKEN}"' in found.resolved_yaml()
    with pytest.raises(PipelineError, match="HUB_TOKEN is a secret by its name"):
        loaded(found.resolved_yaml(), base=False, name="again.yaml")


@pytest.mark.usefixtures("environment")
def test_a_literal_beside_a_reference_is_redacted(loaded: Callable[..., LoadedPipeline]) -> None:
    """A string that takes one secret from the environment may hold another as it is."""
    url = "https://me:pa-ss-wo-rd@h/?token=${env:PW}&key=lite-ral"
    found = loaded(pipeline(f"data: {{mylab.Files: {{url: '{url}'}}}}\n"), base=False)
    assert '"https://[redacted]@h/?token=${env:PW}&key=[redacted]"' in found.resolved_yaml()
    told = found.secrets.redact("pa-ss-wo-rd hunter2-hunter2 lite-ral")
    assert told == "[redacted] ${env:PW} [redacted]"


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
        "data: {mylab.Files: {url: 'https://h/?a=1&access_token=%s'}}\nprecision: '%s'\n",
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
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    vary: str,
) -> None:
    """Nor of `--vary`, which is not part of any pipeline; nor a value that the environment has."""
    monkeypatch.setenv("API_KEY", "canary-canary-2")
    path = tmp_path / "p.yaml"
    path.write_text(pipeline("data: digits\n"))
    given = [f"--vary={vary.replace('%s', 'canary-canary')}", "--vary=canary-canary-2"]
    assert main([command, str(path), *given]) == 2
    printed = capsys.readouterr()
    assert "canary" not in printed.out + printed.err
    assert "--vary 1" in printed.err
    assert "--vary 2" in printed.err


def test_no_variant_of_a_comparison_is_called_by_a_secret(tmp_path: Path) -> None:
    """Its name is in the table, in the page and in faults."""
    path = tmp_path / "p.yaml"
    path.write_text(pipeline("data: digits\n"))
    vary = [("track", ["[{mlflow: {tracking_uri: 'https://u:canary-canary@h'}}]", "[]"])]
    variants = make_variants([path], (), vary, noop=False, twin=True)
    names = [load_variant(one)[0].name for one in variants]
    assert names == [
        "track=[{mlflow: {tracking_uri: 'https://[redacted]@h'}}]",
        "track=[{mlflow: {tracking_uri: 'https://[redacted]@h'}}] once more",
        "track=[]",
    ]


def test_the_caret_stays_under_the_fault(loaded: Callable[..., LoadedPipeline]) -> None:
    """Also where a secret before it on the line was replaced; the column is the file's own."""
    with pytest.raises(PipelineError) as caught:
        loaded(pipeline("data: {digits: {password: canary-canary, held_out: 7}}\n"), base=False)
    fault = next(fault for fault in caught.value.faults if "held_out" in fault.path)
    _, line, caret = str(fault).split("\n")
    assert line[caret.index("^")] == "7"
    assert fault.column == 1 + "data: {digits: {password: canary-canary, held_out: 7}}".index("7")


def test_values_are_found_in_every_form() -> None:
    """As they are, in quotes, in JSON, in a URL, and line by line."""
    multiline = "-----BEGIN KEY-----\nMIIabcdefgh\nMIIijklmnop\n"
    secrets = Secrets.collect([], {"A_TOKEN": CANARY, "PEM_KEY": multiline})
    for text in (CANARY, repr(CANARY), json.dumps(CANARY), json.dumps({"a": [CANARY]}, ensure_ascii=False)):
        told = secrets.redact(f"failed with {text}!")
        assert "${env:A_TOKEN}" in told
        assert "cAnArY" not in told
    assert secrets.redact("line MIIabcdefgh ends") == "line ${env:PEM_KEY} ends"
    assert "MII" not in secrets.redact(repr(multiline))


def test_what_is_too_short_or_a_path_is_no_secret(tmp_path: Path) -> None:
    """A value such as `1` would be replaced everywhere; a path to a key is none."""
    environment = {"A_TOKEN": "1", "B_TOKEN": "w0rd", "KEY": str(tmp_path), "C_KEY": str(tmp_path / "no")}
    secrets = Secrets.collect([], environment)
    assert secrets.redact("1 sw0rd w0rd.") == "1 sw0rd ${env:B_TOKEN}."
    assert secrets.redact(f"in {tmp_path}/x") == f"in {tmp_path}/x"
    assert secrets.redact(f"in {tmp_path}/no") == "in ${env:C_KEY}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("GET https://u:p@ss:w@host/a failed", "GET https://[redacted]@host/a failed"),
        ("https://h/?a=1&api_key=abc&b=2", "https://h/?a=1&api_key=[redacted]&b=2"),
        ("ssh://git@host/x and a@b.c", "ssh://git@host/x and a@b.c"),
        ("https://ghp_0123456789abcdefghij@h/", "https://[redacted]@h/"),
        ("https://u:${env:PW}@h/", "https://u:${env:PW}@h/"),
        ("http://[::1]:80/x@y", "http://[::1]:80/x@y"),
    ],
)
def test_passwords_in_urls(text: str, told: str) -> None:
    """Also in URLs that no pipeline named."""
    assert Secrets({}).redact(text) == told


def test_nothing_takes_long() -> None:
    """64 KiB of anything are redacted within moments."""
    secrets = Secrets.collect([], {f"TOKEN_{n}": f"value-{n}-{n}" for n in range(200)})
    for unit in (
        "a",
        "a:",
        "${env:A}",
        "password: ${env:A}",
        "${",
        "https://",
        "://a",
        "?a",
        "&key=",
        "password: ",
        "a@",
        " ",
        '"',
        "key:'",
    ):
        text = (unit * 65536)[:65536]
        start = time.process_time()
        secrets.redact_line(text)
        secrets.redact_line(text, override=True)
        secrets.redact("https://" + text)
        assert time.process_time() - start < 1, unit


LETTERS, DIGITS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789"
REAL = st.builds(
    lambda text, digit, letter: text[:2] + digit + letter + text[2:],
    st.text(LETTERS + DIGITS + "-_+=/.!", min_size=4, max_size=40),
    st.sampled_from(DIGITS),
    st.sampled_from(LETTERS),
).filter(lambda text: not cannot_be_secret(text) and not re.search(r"[{}$]", text) and "://" not in text)
"""Secrets of six characters and more: letters and digits among each other."""

NONE = st.one_of(
    st.sampled_from(
        ["true", "false", "True", "no", "yes", "on", "off", "none", "null", "auto", "default", "disabled"]
    ),
    st.integers(-9999999, 99999999).map(str),
    st.floats(0, 1).map(lambda number: f"{number:.4g}"),
    st.floats(1e-6, 1e6).map(lambda number: f"{number:f}"),
    st.sampled_from(
        ["main", "store", "cache", "digits", "train", "Manager", "DEBUG", "service", "0", "1e-3"]
    ),
)
AROUND = st.text(st.characters(codec="utf-8", exclude_characters="$"), max_size=12)


@settings(max_examples=300)
@given(secret=REAL, before=AROUND, after=AROUND)
def test_a_secret_of_six_characters_is_found_wherever_it_stands(secret: str, before: str, after: str) -> None:
    """Within a longer word, as a value, as a key, and in what is written."""
    secrets = Secrets.collect([], {"HUB_TOKEN": secret})
    text = f"{before}{secret}{after}"
    assert secret not in secrets.redact(text)
    told = json.dumps(secrets.redact_all({"a": [text], secret: 1, f"x{secret}y": {secret: text}}))
    assert secret not in json.loads(told, object_pairs_hook=lambda pairs: [*map(str, pairs)])
    assert json.dumps(secret)[1:-1] not in told
    written = secrets.redact_pipeline({"data": {"a.B": {"note": text, secret: {f"x{secret}": 1}}}})
    assert json.dumps(secret)[1:-1] not in json.dumps(written)


@settings(max_examples=200)
@given(value=NONE, name=st.sampled_from(["HF_HUB_DISABLE_IMPLICIT_TOKEN", "GIT_CREDENTIAL_HELPER", "KEY"]))
def test_what_is_no_secret_is_never_replaced(value: str, name: str) -> None:
    """Booleans, numbers and short words stay, whatever the variable or option that holds them is called."""
    secrets = Secrets.collect(
        [PipelineString((), value, True), PipelineString((), f"{value}${{env:{name}}}")], {name: value}
    )
    text = f"expected {value} or false, got {value}s; x={value}"
    assert secrets.redact(text) == text
    data = {"data": {"a.B": {"note": text, value: text}}}
    assert secrets.redact_pipeline(data) == data
    assert secrets.redact_all({value: [value]}) == {value: [value]}


PLACES = [
    "{'a.B': {password: VALUE}}",
    "{'a.B': {credentials: {user: VALUE}}}",
    "{'a.B': {headers: [{name: API_TOKEN, value: VALUE}]}}",
    "{'a.B': {url: 'https://me:VALUE@host/x'}}",
    "{'a.B': {url: 'https://${env:USER}:VALUE@host/x'}}",
    "{'a.B': {url: 'https://host/x?a=1&token=VALUE'}}",
]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    secret=st.text(LETTERS + DIGITS + "-_", min_size=4, max_size=20),
    place=st.sampled_from(PLACES),
    data=st.data(),
)
def test_a_literal_beside_a_reference_does_not_survive(
    tmp_path: Path, secret: str, place: str, data: st.DataObject
) -> None:
    """Before it or after it, in everything that is written, in a fault and in the digest."""
    assume(any(char.isalnum() for char in secret))
    literal = f"Zq9{secret}"
    value = data.draw(
        st.sampled_from([f"{literal}${{env:HOME}}", f"${{env:HOME}}{literal}", f"x${{env:PWD}}{literal}-"])
    )
    path = tmp_path / "p.yaml"
    option = place.replace("VALUE", value if "'https" in place else json.dumps(value))
    path.write_text(pipeline(f"data: {option}\n"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", "/home/somebody")
        patch.setenv("PWD", "/somewhere")
        patch.setenv("USER", "somebody")
        found = load(path)
        assert literal not in found.resolved_yaml()
        assert literal not in json.dumps(found.as_dict())
        assert found.fill_placeholders("data", found.pipeline.train_data()).options
        assert literal not in found.secrets.redact(
            f"no answer: {value.replace('${env:HOME}', '/home/somebody')}"
        )
        path.write_text(
            pipeline(f"data: {option}\nseed: {{}}\n").replace("seed: {}", f"other: {json.dumps(value)}")
        )
        with pytest.raises(PipelineError) as caught:
            load(path)
        assert literal not in str(caught.value)


def test_the_literal_of_a_password_is_not_written(loaded: Callable[..., LoadedPipeline]) -> None:
    """What comes from a variable stays by its name; such a file says that it does not load again."""
    found = loaded(pipeline('data: {mylab.Files: {password: "literal-${env:HOME}"}}\n'), base=False)
    assert 'password: "[redacted]${env:HOME}"' in found.resolved_yaml()
    assert "literal" not in found.secrets.redact(f"bad password literal-{os.environ['HOME']}")
    with pytest.raises(PipelineError, match="the secret that was here"):
        loaded(found.resolved_yaml(), base=False, name="again.yaml")


@pytest.mark.parametrize(
    "value",
    [
        *(
            "${env:API_TOKEN}",
            "Bearer ${env:API_TOKEN}",
            "Bearer ${env:WHO}",
            "${env:API_TOKEN}!",
            "x-${env:API_TOKEN}",
        ),
        *("${env:HOME}/key.pem", "${env:HOME}/a/.netrc", "${env:A_KEY}:${env:B_KEY}", "user ${env:A_KEY}"),
    ],
)
def test_what_cannot_be_the_secret_is_written(loaded: Callable[..., LoadedPipeline], value: str) -> None:
    """So that a run with such a pipeline can be resumed."""
    text = pipeline(f'data: {{mylab.Files: {{password: "{value}"}}}}\n')
    found = loaded(text, base=False)
    assert f'password: "{value}"' in found.resolved_yaml()
    assert loaded(found.resolved_yaml(), base=False, name="again.yaml").digest() == found.digest()


def test_check_does_not_take_a_setting_for_a_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable whose name has a secret's word in it may hold `true`."""
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "true")
    path = tmp_path / "p.yaml"
    path.write_text(pipeline("data: digits\nloader: {shuffle: 7}\n"))
    assert main(["check", str(path)]) == 2
    assert "expected true or false, got 7" in capsys.readouterr().out


def test_keys_are_replaced_and_kept_apart(
    loaded: Callable[..., LoadedPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the user's own mappings; a file with such a key does not load, and says where it stands."""
    monkeypatch.setenv("A_TOKEN", "optimizer")
    monkeypatch.setenv("B_TOKEN", "s3cr3t-one")
    found = loaded(pipeline("data: {mylab.Files: {users: {s3cr3t-one: 1, x: 2}}}\n"), base=False)
    written = found.resolved_yaml()
    assert "s3cr3t" not in written
    assert "\noptimizer:" in written
    with pytest.raises(PipelineError, match=r"the secret that was here.*; write the key itself"):
        loaded(written, base=False, name="again.yaml")
    with pytest.raises(PipelineError, match=r"\$\{env:NAME\} is not filled in for keys"):
        loaded(pipeline("data: {mylab.Files: {'${env:B_TOKEN}': 1}}\n"), base=False)
    twins = Secrets.collect([PipelineString((), "a1b2c3d4", True), PipelineString((), "e5f6g7h8", True)], {})
    assert twins.redact_all({"a1b2c3d4": 1, "e5f6g7h8": 2}) == {"[redacted]": 1, "[redacted] 2": 2}


def test_the_environment_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default."""
    monkeypatch.setitem(os.environ, "MY_SECRET", "canary-canary")
    assert Secrets.collect().redact("canary-canary") == "${env:MY_SECRET}"


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
    problem = (
        "AWS_SECRET_ACCESS_KEY is a secret by its name, and goes only into an option that is one by its name"
    )
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
                f"{name} is not filled in: DDPRUN_TRUSTED is set, and DDPRUN_ENV does not name it",
                f"if the pipeline may have its value, set DDPRUN_ENV={names}",
            )
            for name, names in refused.items()
        ]
    monkeypatch.setenv("DDPRUN_ENV", "SERVER, HF_TOKEN")
    monkeypatch.setenv("SERVER", "data.example")
    monkeypatch.setenv("HF_TOKEN", "hf-0123456789")
    found = loaded("", asked)
    assert found.fill_placeholders("data", found.pipeline.data).options == {
        "url": "https://data.example",
        "token": "hf-0123456789",
    }
