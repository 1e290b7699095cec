"""`python -m gateway`: one gateway, until SIGTERM."""

from baton.config import GatewaySettings, quiet_grpc, read_settings


def main() -> None:
    settings = read_settings(GatewaySettings, "gateway")
    quiet_grpc()  # before its import, at which it reads the variable
    from gateway.start import start

    start(settings)


if __name__ == "__main__":
    main()
