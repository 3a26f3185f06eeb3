package cluster

import (
	"bytes"
	"testing"
	"time"
)

func TestSharedRecordRoundTrip(t *testing.T) {
	for _, secret := range []string{"", "a secret of the proxies"} {
		a := authenticator{secret: secret, prefix: "p:"}
		value := appendSharedRecord(nil, "replica/a", []byte(`{"by":"x"}`), testTime, a)
		data, written, err := parseSharedRecord("replica/a", value, a)
		if err != nil || string(data) != `{"by":"x"}` || !written.Equal(testTime) {
			t.Errorf("got %s, %v, %v", data, written, err)
		}
		if _, _, err := parseSharedRecord("replica/b", value, a); err == nil {
			t.Error("the record of another name was read")
		}
		for i := range value {
			damaged := bytes.Clone(value)
			damaged[i] ^= 1
			if _, _, err := parseSharedRecord("replica/a", damaged, a); err == nil {
				t.Errorf("byte %d was changed, and the record read", i)
			}
		}
		for _, other := range []authenticator{{secret: "another secret of proxies", prefix: "p:"}, {secret: secret, prefix: "q:"}} {
			if _, _, err := parseSharedRecord("replica/a", value, other); err == nil && (secret != "" || other.isSigned()) {
				t.Error("the record of another fleet was read")
			}
		}
	}
}

// FuzzSharedRecord asserts that without the secret no record can be made.
func FuzzSharedRecord(f *testing.F) {
	a := authenticator{secret: "a secret of the proxies", prefix: "p:"}
	known := appendSharedRecord(nil, "replica/a", []byte(`{}`), time.UnixMilli(0), a)
	f.Add("replica/a", known)
	f.Add("replica/b", known)
	f.Add("", []byte{})
	f.Fuzz(func(t *testing.T, name string, value []byte) {
		if _, _, err := parseSharedRecord(name, value, a); err == nil && (name != "replica/a" || !bytes.Equal(value, known)) {
			t.Errorf("%q was read as the record of %q", value, name)
		}
		if data, _, err := parseSharedRecord(name, value, authenticator{}); err == nil && len(data) > len(value) {
			t.Errorf("%q was read as %q", value, data)
		}
	})
}
