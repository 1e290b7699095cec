"""`python -m baton.gateway.picker`: runs one endpoint picker until SIGTERM."""

from baton.core.interrupts import plain_interrupts


def main() -> None:
    with plain_interrupts("picker"):
        from baton.settings.environment import quiet_grpc
        from baton.settings.gateway_config import PickerSettings
        from baton.settings.reader import read_settings

        settings = read_settings(PickerSettings, "picker")
        quiet_grpc()  # before gRPC's import, which reads the variable
        from baton.gateway.picker.process import start

    start(settings)


if __name__ == "__main__":
    main()
