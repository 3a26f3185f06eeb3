package proxy

import (
	"bytes"

	"warmroute/prompt"
	"warmroute/proxy/fault"
)

// AllowTransferParams is the value of limits.kv_transfer_params by which they are accepted.
const AllowTransferParams = "allow"

// allowsTransferParams reports whether clients may send, and get, parameters of KV transfers.
func (r *request) allowsTransferParams() bool {
	return r.settings.KVTransferParams == AllowTransferParams
}

// checkTransferParams refuses a body in which pr found parameters of KV transfers. With them a client can have a replica connect to any
// host, read the KV cache of another tenant's prompts, and end the replica's process.
func (r *request) checkTransferParams(pr *prompt.Prompt) *fault.Error {
	if pr.TransferParams == "" || r.allowsTransferParams() {
		return nil
	}
	return fault.InvalidRequest(pr.TransferParams,
		pr.TransferParams+" is not accepted from clients: remove it from the request (limits.kv_transfer_params)")
}

// blankTransferParams overwrites the parameters of KV transfers, which name hosts and blocks, in a complete response: an object becomes
// null and spaces, so that the length stays.
func blankTransferParams(response []byte) {
	var b transferParamsBlanker
	b.blank(response)
}

// pieceWriter writes a response in pieces and flushes each.
type pieceWriter struct {
	client      *clientWriter
	passThrough bool // parameters of KV transfers are not overwritten
	blanker     transferParamsBlanker
}

// Write writes a piece. Unlike other writers it may overwrite it.
func (w *pieceWriter) Write(piece []byte) (int, error) {
	kept := piece
	if !w.passThrough {
		kept = w.blanker.blank(piece)
	}
	if err := w.client.writeAndFlush(kept); err != nil {
		return 0, err
	}
	return len(piece), nil
}

// writeUndecided writes what was kept for the next piece, after the last one.
func (w *pieceWriter) writeUndecided() error {
	if len(w.blanker.undecided) == 0 {
		return nil
	}
	return w.client.writeAndFlush(w.blanker.undecided)
}

// transferParamsBlanker does so to a response that arrives in pieces, at any depth. The text of models and clients is in
// strings, where no key is found, except for the tools and schemas that /v1/responses repeats. Keys are found as vLLM writes them:
// without escapes, and followed by little white space. Not safe for concurrent use.
type transferParamsBlanker struct {
	events    bool   // the response is a stream of events, where an object ends with its line
	undecided []byte // the end of the last piece, which may be the beginning of a key and its object
	last      byte   // the byte before undecided
	object    objectBlanker
}

const (
	transferParamsSuffix = `_transfer_params"` // of both keys
	transferParamsBytes  = len(`"kv`) + len(transferParamsSuffix)
	maxKeyGap            = 8 // bytes of white space after a key, a colon and an opening brace
)

// blank overwrites the objects in the next piece, and returns what can be written. It keeps the rest, which is short.
func (t *transferParamsBlanker) blank(piece []byte) []byte {
	if len(t.undecided) > 0 {
		piece = append(t.undecided, piece...)
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
	t.undecided = bytes.Clone(piece[end:])
	return piece[:end]
}

// partialKey returns the index of the beginning of a key that piece ends in, or the length of piece.
func (t *transferParamsBlanker) partialKey(piece []byte) int {
	from := max(0, len(piece)-transferParamsBytes+1)
	if i := bytes.LastIndexByte(piece[from:], '"'); i >= 0 && t.startsKey(piece, from+i) {
		return from + i
	}
	return len(piece)
}

// startsKey reports whether piece[i:] is a key, with or without more, or the beginning of one.
func (t *transferParamsBlanker) startsKey(piece []byte, i int) bool {
	before := t.last
	if i > 0 {
		before = piece[i-1]
	}
	if before == '\\' { // the quote is part of a string
		return false
	}
	written := piece[i:min(i+transferParamsBytes, len(piece))]
	for _, name := range prompt.TransferParamNames {
		if written[0] == '"' && (name + `"`)[:len(written)-1] == string(written[1:]) {
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
