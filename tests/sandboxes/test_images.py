"""Images: which bases a Dockerfile has, what is built, and what of an image a sandbox takes."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_image import missing, write_base

from gyre.core.errors import ConfigError, SandboxError
from gyre.sandboxes import BubblewrapProvider, ImageSpec, SandboxSection, SandboxSpec
from gyre.sandboxes.containers.image_store import ImageStore
from gyre.sandboxes.containers.images import local_reference, mapping, plan
from gyre.sandboxes.isolation.ids import of_this_machine

IMAGES = {"debian:12": "/bases/debian", "python:3.*": "/bases/python", "ghcr.io/x/*": "localhost/mine"}
without = missing() or ("" if os.geteuid() == 0 else "only root can give an image its ids")
needs_images = pytest.mark.skipif(bool(without), reason=without or "images can be tested here")

DOCKERFILE = """\
ARG VERSION=12
FROM debian:${VERSION} AS build
RUN make
FROM --platform=linux/amd64 python:3.13-slim@sha256:0123
COPY --from=build /x /x
COPY --chown=1:1 --from=ghcr.io/x/uv:0.7 /uv /bin/
FROM scratch
FROM unknown/thing:1
"""


def test_mapped_bases_are_replaced_and_nothing_else_is() -> None:
    planned = plan(DOCKERFILE, IMAGES)
    bases = ("debian:12", "python:3.13-slim@sha256:0123", "ghcr.io/x/uv:0.7", "unknown/thing:1")
    assert planned.bases == bases
    expected = DOCKERFILE.replace("debian:${VERSION}", local_reference(bases[0]))
    expected = expected.replace(bases[1], local_reference(bases[1])).replace(bases[2], local_reference(bases[2]))
    assert planned.text == expected
    assert plan(DOCKERFILE, IMAGES, {"VERSION": "13"}).bases[0] == "debian:13"


def test_a_mapping_is_by_name_without_digest_or_by_the_longest_pattern() -> None:
    images = {"a:1": "exact", "a*": "short", "a:2*": "long"}
    assert [mapping(name, images) for name in ("a:1", "a:1@sha256:0", "a:2.5", "a:3", "b")] == [
        *("exact", "exact", "long", "short"),
        None,
    ]


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="gyre-images-", dir="/var/lib" if os.geteuid() == 0 else None))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@needs_images
async def test_a_dockerfile_is_built_as_it_is_and_its_layers_are_shared(root: Path, tmp_path: Path) -> None:
    base = write_base(root / "base.tar")
    section = SandboxSection(images={"debian:12": str(base)}, image_store=root / "store")
    provider = BubblewrapProvider(section)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
        (tmp_path / name / "Dockerfile").write_text(
            "FROM debian:12\nENV A=b\nWORKDIR /work\nRUN echo hi > made && chown 1000:1000 made && mkdir /home/user/x\n"
            "COPY file file\nUSER user\n"
        )
    log = tmp_path / "log"
    one = await provider.prepare(ImageSpec(context=tmp_path / "one"), log=log)
    two = await provider.prepare(ImageSpec(context=tmp_path / "two"), log=log)
    assert (one.workdir, one.user, one.env["A"]) == ("/work", "user", "b")
    assert one.layers[0] != two.layers[0]
    assert one.layers[1:] == two.layers[1:]
    assert "RUN echo hi" in log.read_text()
    again = await BubblewrapProvider(section).prepare(ImageSpec(context=tmp_path / "one"))
    assert again == one
    sandbox = provider.create(SandboxSpec(name="x", root=tmp_path / "x", image=one, workdir=one.workdir))
    await sandbox.start()
    script = "id -u; cat made file; stat -c '%u %g' made; echo $HOME $A; touch /home/user/y || echo denied"
    result = await sandbox.exec(
        ["sh", "-c", script], stdout=tmp_path / "out", stderr=tmp_path / "err", timeout_s=60, boot_timeout_s=60
    )
    assert result.exit_code == 0, (tmp_path / "err").read_text()
    assert (tmp_path / "out").read_text() == "1000\nhi\none1000 1000\n/home/user b\n"
    await sandbox.close(keep=False)


@needs_images
async def test_ids_inside_are_a_whole_range_and_none_is_the_hosts(root: Path, tmp_path: Path) -> None:
    section = SandboxSection(images={"tiny": str(write_base(root / "base2.tar"))}, image_store=root / "store")
    provider = BubblewrapProvider(section)
    image = await provider.prepare(ImageSpec(reference="tiny"))
    sandbox = provider.create(SandboxSpec(name="x", root=tmp_path / "x", image=image))
    await sandbox.start()
    script = "cd /app; touch a; chown 65534:65534 a; touch b; chown 1000:5 b; stat -c '%u %g' a b; id -u; mknod d c 1 3"
    await sandbox.exec(
        ["sh", "-c", script], stdout=tmp_path / "out", stderr=tmp_path / "err", timeout_s=60, boot_timeout_s=60
    )
    assert (tmp_path / "out").read_text() == "65534 65534\n1000 5\n0\n"
    first = of_this_machine().first
    assert (sandbox.spec.workspace / "a").stat().st_uid == first + 65534
    owners = {path.lstat().st_uid for path in sandbox.spec.layer.rglob("*")}
    assert all(first <= owner < first + 65536 for owner in owners if owner)
    await sandbox.close(keep=False)


@needs_images
async def test_what_is_missing_is_named(root: Path, tmp_path: Path) -> None:
    store = ImageStore(root / "store", of_this_machine(), {"bad": "/nowhere.tar"})
    (tmp_path / "Dockerfile").write_text("FROM ubuntu:24.04\n")
    with pytest.raises(SandboxError, match=r"starts from ubuntu:24.04, which sandbox.images does not map"):
        await store.prepare(ImageSpec(context=tmp_path))
    with pytest.raises(SandboxError, match="image foo:1 is not here"):
        await store.prepare(ImageSpec(reference="foo:1"))
    with pytest.raises(SandboxError, match=r"/nowhere.tar.*no such directory"):
        await store.prepare(ImageSpec(reference="bad"))
    with pytest.raises(SandboxError, match="there is no other to build"):
        await store.prepare(ImageSpec(context=tmp_path, dockerfile="other"))
    (tmp_path / "Dockerfile").write_text("FROM scratch\nRUN false\n")
    with pytest.raises(SandboxError, match="podman build failed"):
        await store.prepare(ImageSpec(context=tmp_path))


@needs_images
def test_a_store_that_ids_inside_cannot_enter_is_refused(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="may not pass"):
        ImageStore(closed / "store", of_this_machine())
