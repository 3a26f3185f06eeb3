package relay

import (
	"bytes"

	"warmroute/prompt"
)

// BlankTransferParams overwrites the parameters of KV transfers, which name hosts and blocks, in a complete response: an object becomes
// null and spaces, so that the length stays.
func BlankTransferParams(response []byte) {
	var b TransferParamsBlanker
	b.Blank(response)
}

// PieceWriter writes a response in pieces and flushes each.
type PieceWriter struct {
	client      *ClientWriter
	passThrough bool // parameters of KV transfers are not overwritten
	blanker     TransferParamsBlanker
}

// NewPieceWriter returns a writer to client. events says that the response is a stream of events.
func NewPieceWriter(client *ClientWriter, passThrough, events bool) PieceWriter {
	return PieceWriter{client: client, passThrough: passThrough, blanker: TransferParamsBlanker{events: events}}
}

// Write writes a piece. Unlike other writers it may overwrite it.
func (w *PieceWriter) Write(piece []byte) (int, error) {
	kept := piece
	if !w.passThrough {
		kept = w.blanker.Blank(piece)
	}
	if err := w.client.WriteAndFlush(kept); err != nil {
		return 0, err
	}
	return len(piece), nil
}

// WriteUndecided writes what was kept for the next piece, after the last one.
func (w *PieceWriter) WriteUndecided() error {
	if len(w.blanker.Undecided) == 0 {
		return nil
	}
	return w.client.WriteAndFlush(w.blanker.Undecided)
}

// TransferParamsBlanker is BlankTransferParams for a response that arrives in pieces, at any depth. The text of models and clients is in
// strings, where no key is found, except for the tools and schemas that /v1/responses repeats. Keys are found as vLLM writes them:
// without escapes, and followed by little white space. Not safe for concurrent use.
type TransferParamsBlanker struct {
	events    bool   // the response is a stream of events, where an object ends with its line
	Undecided []byte // the end of the last piece, which may be the beginning of a key and its object
	last      byte   // the byte before Undecided
	object    objectBlanker
}

const (
	transferParamsSuffix = `_transfer_params"` // of both keys
	transferParamsBytes  = len(`"kv`) + len(transferParamsSuffix)
	maxKeyGap            = 8 // bytes of white space after a key, a colon and an opening brace
)

// Blank overwrites the objects in the next piece, and returns what can be written. It keeps the rest, which is short.
func (t *TransferParamsBlanker) Blank(piece []byte) []byte {
	if len(t.Undecided) > 0 {
		piece = append(t.Undecided, piece...)
	}
	end := -1
	for i := t.object.blank(piece, t.events); end < 0; {
		n := bytes.Index(piece[i:], []byte(transferParamsSuffix))
		if n < 0 {
			end = t.partialKey(piece)
			break
		}
		i += n + len(transferParamsSuffix)
		key := i - transferParamsBytes
		if key < 0 || !t.startsKey(piece, key) {
			continue
		}
		switch object, decided := objectAfterKey(piece, i); {
		case !decided:
			end = key
		case object >= 0:
			t.object.open = true
			i = object + t.object.blank(piece[object:], t.events)
		}
	}
	if end > 0 {
		t.last = piece[end-1]
	}
	t.Undecided = bytes.Clone(piece[end:])
	return piece[:end]
}

// partialKey returns the index of the beginning of a key that piece ends in, or the length of piece.
func (t *TransferParamsBlanker) partialKey(piece []byte) int {
	from := max(0, len(piece)-transferParamsBytes+1)
	if i := bytes.LastIndexByte(piece[from:], '"'); i >= 0 && t.startsKey(piece, from+i) {
		return from + i
	}
	return len(piece)
}

// startsKey reports whether piece[i:] is a key, with or without more, or the beginning of one.
func (t *TransferParamsBlanker) startsKey(piece []byte, i int) bool {
	before := t.last
	if i > 0 {
		before = piece[i-1]
	}
	if before == '\\' { // the quote is part of a string
		return false
	}
	written := piece[i:min(i+transferParamsBytes, len(piece))]
	if written[0] != '"' {
		return false
	}
	written = written[1:]
	for _, name := range prompt.TransferParamNames {
		n := min(len(name), len(written))
		if name[:n] == string(written[:n]) && (n == len(written) || written[n] == '"') {
			return true
		}
	}
	return false
}

// objectAfterKey returns the index of the object whose key ends at i, -1 if the value is none or an empty one. decided is false if that
// depends on what follows b.
func objectAfterKey(b []byte, i int) (object int, decided bool) {
	colon := skipGap(b, i)
	if colon == len(b) {
		return -1, false
	}
	if b[colon] != ':' {
		return -1, true
	}
	object = skipGap(b, colon+1)
	if object == len(b) {
		return -1, false
	}
	if b[object] != '{' {
		return -1, true
	}
	first := skipGap(b, object+1)
	switch {
	case first == len(b):
		return -1, false
	case b[first] == '}' && first+1-object < len("null"):
		return -1, true
	}
	return object, true
}

// skipGap returns the index after the white space at i, of which it skips at most maxKeyGap bytes.
func skipGap(b []byte, i int) int {
	for end := min(len(b), i+maxKeyGap); i < end && (b[i] == ' ' || b[i] == '\t' || b[i] == '\n' || b[i] == '\r'); {
		i++
	}
	return i
}

// objectBlanker overwrites a JSON object that arrives in pieces with null and spaces.
type objectBlanker struct {
	open     bool // there is such an object
	offset   int  // bytes of it so far
	depth    int  // of its open containers
	inString bool
	escaped  bool // the next byte of the string is
}

// blank overwrites the part of the object that b begins with, and returns its length.
func (o *objectBlanker) blank(b []byte, endsWithLine bool) int {
	if !o.open {
		return 0
	}
	for i, c := range b {
		if (c == '\n' || c == '\r') && endsWithLine {
			*o = objectBlanker{}
			return i
		}
		if b[i] = ' '; o.offset < len("null") {
			b[i] = "null"[o.offset]
		}
		o.offset++
		switch {
		case o.escaped:
			o.escaped = false
		case o.inString:
			o.escaped, o.inString = c == '\\', c != '"'
		case c == '"':
			o.inString = true
		case c == '{' || c == '[':
			o.depth++
		case c == '}' || c == ']':
			if o.depth--; o.depth == 0 {
				*o = objectBlanker{}
				return i + 1
			}
		}
	}
	return len(b)
}
