"""Can ``nanoengine serve`` run here? Its packages, its application, its port."""

from __future__ import annotations

from nanoengine.doctor.check import DISTRIBUTIONS, Check, is_older, pip_install, required, version_of

NEEDED = ("fastapi", "uvicorn", "prometheus_client")
PORT = 8000  # what `nanoengine serve` takes by itself


def serve() -> Check:
    floors, missing, old = required("serve"), [], []
    for name in NEEDED:
        try:
            if is_older(version_of(name), floors.get(DISTRIBUTIONS.get(name, name), "0")):
                old.append(name)
        except ModuleNotFoundError:
            missing.append(name)
    if missing:
        return Check("missing", f"nanoengine serve needs {', '.join(missing)}", pip_install(*missing, *old))
    if old:
        return Check("problem", f"too old for nanoengine serve: {', '.join(old)}", pip_install(*old))
    from nanoengine.server.run import listen  # with all that the server imports

    try:
        listen("127.0.0.1", PORT).close()
    except OSError as error:
        taken = str(error).partition(": choose")[0]
        return Check("ok", f"nanoengine serve can run; {taken}", "nanoengine serve --port 0  # any free port")
    return Check("ok", f"nanoengine serve can run, on http://127.0.0.1:{PORT}/v1")
