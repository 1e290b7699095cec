"""`python -m baton.gateway`: one gateway, until SIGTERM."""

from baton.core.interrupts import plain_interrupts


def main() -> None:
    with plain_interrupts("gateway"):
        from baton.settings.environment import quiet_grpc
        from baton.settings.gateway_config import GatewaySettings
        from baton.settings.reader import read_settings

        settings = read_settings(GatewaySettings, "gateway")
        quiet_grpc()  # before its import, at which it reads the variable
        from baton.gateway.process.start import start

    start(settings)


if __name__ == "__main__":
    main()
