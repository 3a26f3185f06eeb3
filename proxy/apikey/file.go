package apikey

import (
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"unicode"
)

// ShortestKey is the fewest characters of a key that is given in plain: fewer can
// be guessed.
const ShortestKey = 20

// Secret is one line of a file of keys: a secret that is the key of that name.
type Secret struct {
	Name string
	Hash Hash
	Line int // from 1
}

// ParseFile reads a file of keys. Each line is a name and, behind spaces, a key in
// plain or "sha256:" and its hash in hexadecimal; empty lines and those that begin
// with # are none. A name may have several. The faults name lines and what to do
// and never show what stands there.
func ParseFile(data string) (secrets []Secret, faults []error) {
	n := 0
	for line := range strings.Lines(data) {
		n++
		s, err := parseLine(line)
		switch {
		case err != nil:
			faults = append(faults, fmt.Errorf("line %d: %w", n, err))
		case s.Name != "":
			s.Line = n
			secrets = append(secrets, s)
		}
	}
	return secrets, faults
}

func parseLine(line string) (s Secret, err error) {
	fields := strings.Fields(line)
	switch {
	case len(fields) == 0 || strings.HasPrefix(fields[0], "#"):
		return Secret{}, nil
	case len(fields) != 2:
		return Secret{}, errors.New("write a name, a space and the key, nothing else")
	case !IsName(strings.TrimSuffix(fields[0], ":")): // a colon is what YAML has there
		return Secret{}, errors.New("the name cannot be one: " + NameRule)
	}
	s.Name = strings.TrimSuffix(fields[0], ":")
	if given, hashed := strings.CutPrefix(fields[1], "sha256:"); hashed {
		s.Hash, err = ParseHash(given)
		return s, err
	}
	if len(fields[1]) < ShortestKey || strings.ContainsFunc(fields[1], func(r rune) bool { return r <= ' ' || r > '~' }) {
		return Secret{}, fmt.Errorf("the key has to be %d or more visible ASCII characters, from a random source: openssl rand -hex 32", ShortestKey)
	}
	s.Hash = HashOf(fields[1])
	return s, nil
}

// ParseHash reads a hash as sha256sum prints it.
func ParseHash(text string) (h Hash, err error) {
	digits, _, _ := strings.Cut(strings.TrimSpace(text), " ")
	if n, err := hex.Decode(h[:], []byte(digits[:min(len(digits), 2*len(h))])); err != nil || n != len(h) || len(digits) != 2*len(h) {
		return Hash{}, errors.New(`is no SHA-256: write the 64 digits that printf %s "$KEY" | sha256sum prints`)
	}
	return h, nil
}

// NameRule says what IsName asks for.
const NameRule = "it stands in metrics; use 1 to 100 letters, digits and ._:@/-"

// IsName reports whether a key may be called so.
func IsName(name string) bool {
	return name != "" && len(name) <= 100 && !strings.ContainsFunc(name, func(r rune) bool {
		return r > unicode.MaxASCII || !unicode.IsLetter(r) && !unicode.IsDigit(r) && !strings.ContainsRune("._:@/-", r)
	})
}
