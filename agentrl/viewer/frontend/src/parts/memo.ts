/** Skip drawing a component whose properties have not changed. */
import { Component, type ComponentType, createElement } from "preact";

export function memo<P extends object>(inner: (props: P) => preact.JSX.Element): ComponentType<P> {
  return class Memo extends Component<P> {
    override shouldComponentUpdate(next: P): boolean {
      const old = this.props as Record<string, unknown>;
      const now = next as Record<string, unknown>;
      return [...new Set([...Object.keys(old), ...Object.keys(now)])].some(
        (key) => key !== "children" && old[key] !== now[key],
      );
    }

    override render() {
      return createElement(inner as ComponentType<P>, this.props);
    }
  };
}
