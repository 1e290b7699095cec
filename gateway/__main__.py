"""`python -m gateway`: one gateway, until SIGTERM."""

from baton.interrupts import plain_interrupts


def main() -> None:
    with plain_interrupts("gateway"):
        from baton.environment import quiet_grpc
        from baton.gateway_config import GatewaySettings
        from baton.settings_reader import read_settings

        settings = read_settings(GatewaySettings, "gateway")
        quiet_grpc()  # before its import, at which it reads the variable
        from gateway.start import start

    start(settings)


if __name__ == "__main__":
    main()
