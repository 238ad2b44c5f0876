"""The real world behind the controller's protocols: processes, engines, trainers, proxy, runner, run directory."""
