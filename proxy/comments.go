package proxy

import "bytes"

// commentFilter removes comments from a stream of server-sent events, and the empty lines after
// them that end no event. It keeps nothing of the stream.
type commentFilter struct {
	line    lineKind // of the incomplete line at the end of what was filtered
	inEvent bool     // the current event has a line
}

// lineKind is what is known of a line from its beginning.
type lineKind uint8

const (
	lineNotBegun lineKind = iota
	lineComment
	lineField
)

// filter removes the comments from the next bytes of the stream, in place, and returns the rest.
func (f *commentFilter) filter(b []byte) []byte {
	kept := b[:0]
	for len(b) > 0 {
		if f.line == lineNotBegun {
			switch {
			case b[0] == ':':
				f.line = lineComment
			case b[0] == '\n' || b[0] == '\r': // an empty line
				if f.inEvent {
					kept = append(kept, b[0])
				}
				f.inEvent = f.inEvent && b[0] == '\r' // \n follows
				b = b[1:]
				continue
			default:
				f.line, f.inEvent = lineField, true
			}
		}
		end := bytes.IndexByte(b, '\n') + 1
		if end == 0 {
			end = len(b)
		}
		if f.line == lineField {
			kept = append(kept, b[:end]...)
		}
		if b[end-1] == '\n' {
			f.line = lineNotBegun
		}
		b = b[end:]
	}
	return kept
}
