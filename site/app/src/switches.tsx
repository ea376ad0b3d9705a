// Choices that exclude each other, as radio buttons that look like one control.

interface Props {
  legend: string;
  values: readonly { value: string; label: string; title?: string }[];
  chosen: string;
  onChoose: (value: string) => void;
}

export function Switch({ legend, values, chosen, onChoose }: Props) {
  if (values.length < 2) return null;
  const name = `switch-${legend}`;
  return (
    <fieldset class="switch">
      <legend>{legend}</legend>
      {values.map(({ value, label, title }) => (
        <label title={title}>
          <input
            type="radio"
            name={name}
            value={value}
            checked={value === chosen}
            onChange={() => onChoose(value)}
          />
          <span>{label}</span>
        </label>
      ))}
    </fieldset>
  );
}
