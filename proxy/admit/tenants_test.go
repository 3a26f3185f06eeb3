package admit

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestBodyShare(t *testing.T) {
	var all Tenants
	limits := BodyLimits{1000, 8000}
	one, two, three := Tenant{Key: "one"}, Tenant{Key: "two"}, Tenant{Key: "three"}
	f := func(of Tenant, n int64, want error) {
		t.Helper()
		if err := all.reserveBodyBytes(of, n, limits); err != want {
			t.Errorf("%d bytes for %s: %v, want %v", n, of.Key, err, want)
		}
	}
	f(one, 8000, nil) // nobody else needs it
	f(one, 1, ErrBodyMemory)
	all.releaseBodyBytes(one, 4001)
	f(two, 1, nil)
	f(one, 1, ErrBodyShare)
	f(two, 1999, nil)
	f(two, 1, ErrBodyShare)
	f(three, 2000, nil)
	f(Tenant{}, 2, ErrBodyMemory)
	all.releaseBodyBytes(one, 2499)
	f(one, 501, ErrBodyShare)
	f(one, 500, nil)
	all.releaseBodyBytes(one, 2000)
	all.releaseBodyBytes(two, 2000)
	all.releaseBodyBytes(three, 2000)
	if len(all.use) != 0 || all.BodyBytesInUse() != 0 {
		t.Errorf("%v, %d bytes in use", all.use, all.BodyBytesInUse())
	}
	limits.Each = 7000 // one body is always allowed
	f(one, 7000, nil)
	f(one, 1, ErrBodyShare) // the others were refused a moment ago
	all.releaseBodyBytes(one, 7000)
}

func TestUploadShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit = 16
		var all Tenants
		inFlight := int64(0)
		one, two := Tenant{Key: "one"}, Tenant{Key: "two"}
		f := func(of Tenant, n int, want error) {
			t.Helper()
			for range n {
				if err := all.BeginUpload(of, inFlight+1, limit); err != want {
					t.Fatalf("%s with %d in flight: %v, want %v", of.Key, inFlight, err, want)
				} else if err == nil {
					inFlight++
				}
			}
		}
		end := func(of Tenant, n int) {
			for range n {
				all.EndUpload(of)
				all.EndRequest(of)
				inFlight--
			}
		}
		f(one, limit, nil) // alone
		all.RecordRefusal(two)
		end(one, limit-4)
		f(one, 4, nil) // half of the limit is free
		f(one, 1, ErrUploadShare)
		end(one, 4)
		f(two, 1, nil)
		time.Sleep(refusalWindow)
		f(one, 3, nil)
		f(one, 1, ErrUploadShare) // the other one has a request
		f(two, 3, nil)
		for range 4 {
			all.EndUpload(two) // and is complete
		}
		f(two, 4, nil)
		f(two, 1, ErrUploadShare)
		for range 4 {
			all.EndUpload(two)
			all.EndRequest(two)
		}
		for range 4 {
			all.EndRequest(two)
		}
		inFlight -= 8
		f(one, 1, nil)
		f(one, 1, ErrUploadShare) // the other one was refused
		time.Sleep(refusalWindow)
		f(one, limit-8, nil)
		end(one, limit)
		if len(all.use) != 0 {
			t.Errorf("in use: %v", all.use)
		}
	})
}
