import resource

from launcher_contract import LauncherContract, calling, spec

from gyre.launch.base import Launcher


class TestLocalLauncher(LauncherContract):
    IMPORTS = "from gyre.launch import LocalLauncher"
    MAKE = "LocalLauncher(logs, devices={'cell-1': ['0', '1']})"

    async def test_worker_may_have_all_the_files_that_the_system_allows(self, launcher: Launcher) -> None:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] // 2, before[1]))
        try:
            process = await launcher.start(spec())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        async with calling(launcher, process) as echo:
            assert resource.prlimit(await echo.pid(), resource.RLIMIT_NOFILE) == (before[1], before[1])


class TestLocalLauncherOverTcp(LauncherContract):
    """As a node of a cluster uses it."""

    IMPORTS = "from gyre.launch import LocalLauncher"
    MAKE = "LocalLauncher(logs, host='127.0.0.1', devices={'cell-1': ['0', '1']})"
