"""x"""
import click
@click.command()
def export() -> None:
    """Later."""
