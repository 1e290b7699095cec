"""`python -m gateway.picker`: one endpoint picker, until SIGTERM."""

from baton.environment import quiet_grpc
from baton.gateway_config import PickerSettings
from baton.settings_reader import read_settings


def main() -> None:
    settings = read_settings(PickerSettings, "picker")
    quiet_grpc()  # before its import, at which it reads the variable
    from gateway.picker.process import start

    start(settings)


if __name__ == "__main__":
    main()
