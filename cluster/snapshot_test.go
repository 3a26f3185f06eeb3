package cluster

import "testing"

func FuzzSnapshotHead(f *testing.F) {
	f.Add([]byte(`{"generation":"OF66UGCC6RCHSMNBIPA5WT5JFH","bytes":345398,"checksum":18446744073709551615,"position":"1795660997804-0"}`))
	f.Add([]byte(`{"bytes":-1}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		h, err := parseSnapshotHead(text)
		if err != nil {
			return
		}
		if n := h.pieces(); n < 0 || n > maxPieces || !validGeneration.MatchString(h.Generation) || !validPosition.MatchString(h.Position) {
			t.Errorf("%+v is accepted", h)
		}
	})
}
