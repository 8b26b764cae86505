"""Token trees and finished searches as text and SVG."""

__all__: list[str] = []
