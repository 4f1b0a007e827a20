// Text of token ids by a model's tokenizer.json, which is read in the browser and sent nowhere.

/** The byte of each character that byte-level pieces are written in. */
const BYTES = new Map();
{
  let next = 256;
  for (let byte = 0; byte < 256; byte++) {
    const printed = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
    BYTES.set(printed ? byte : next++, byte);
  }
}

const UTF8 = new TextEncoder();

export class Tokenizer {
  #pieces = new Map();
  #added = new Map();
  #byteLevel;
  #joined;

  /** Throws where the file is no tokenizer.json. */
  constructor(file) {
    const { model, decoder, added_tokens: added = [] } = file;
    const vocabulary = Array.isArray(model.vocab) ? model.vocab.map(([piece], id) => [piece, id]) : Object.entries(model.vocab);
    vocabulary.forEach(([piece, id]) => this.#pieces.set(id, piece));
    added.forEach(({ id, content }) => this.#added.set(id, content));
    this.#byteLevel = JSON.stringify(decoder ?? null).includes("ByteLevel");
    this.#joined = model.type === "WordLevel" ? " " : "";
  }

  /** Bytes that make no character, as at a cut within one, become U+FFFD. */
  decode(ids) {
    return new TextDecoder().decode(new Uint8Array(ids.flatMap((id) => [...this.#bytes(id)])));
  }

  #bytes(id) {
    if (this.#added.has(id)) {
      return UTF8.encode(this.#added.get(id));
    }
    const piece = this.#pieces.get(id) ?? `\u27e8${id}\u27e9`;
    if (this.#byteLevel) {
      return [...piece].flatMap((char) => (BYTES.has(char.codePointAt(0)) ? [BYTES.get(char.codePointAt(0))] : [...UTF8.encode(char)]));
    }
    const byte = /^<0x([0-9A-F]{2})>$/.exec(piece);
    return byte ? [parseInt(byte[1], 16)] : UTF8.encode(piece.replaceAll("\u2581", " ") + this.#joined);
  }
}
