from launcher_contract import LauncherContract


class TestLocalLauncher(LauncherContract):
    IMPORTS = "from gyre.launch import LocalLauncher"
    MAKE = "LocalLauncher(logs, devices={'cell-1': ['0', '1']})"


class TestLocalLauncherOverTcp(LauncherContract):
    """As a node of a cluster uses it."""

    IMPORTS = "from gyre.launch import LocalLauncher"
    MAKE = "LocalLauncher(logs, host='127.0.0.1', devices={'cell-1': ['0', '1']})"
