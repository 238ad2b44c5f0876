"""A root file system of one static program, so that image tests need no registry and no distribution."""

import shutil
import tarfile
from io import BytesIO
from pathlib import Path

APPLETS = (
    "sh ls cat echo id mkdir touch chown chmod sleep env true false kill grep stat ln rm mkfifo setsid head tail tr"
)
APPLETS += " wc dd cut find printf nc nproc test expr seq usleep chroot ps"
PASSWD = "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"


def missing() -> str:
    """Why no image can be tested here; "" when one can."""
    for name, package in (("podman", "podman"), ("runc", "runc"), ("busybox", "busybox-static")):
        if shutil.which(name) is None and not Path("/usr/sbin", name).exists():
            return f"{name} is not installed: apt-get install {package}"
    return ""


def write_base(path: Path) -> Path:
    """A tar file with busybox, its applets, and the least of /etc."""
    program = shutil.which("busybox")
    assert program is not None
    with tarfile.open(path, "w") as tar:
        for name, mode in (("bin", 0o755), ("etc", 0o755), ("root", 0o700), ("home/user", 0o755), ("tmp", 0o1777)):
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, mode
            if name == "home/user":
                info.uid = info.gid = 1000
            tar.addfile(info)
        tar.add(program, "bin/busybox")
        for applet in APPLETS.split():
            info = tarfile.TarInfo(f"bin/{applet}")
            info.type, info.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(info)
        for name, text in (("etc/passwd", PASSWD), ("etc/group", "root:x:0:\nuser:x:1000:\n")):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(text), 0o644
            tar.addfile(info, BytesIO(text.encode()))
    path.chmod(0o644)
    return path
